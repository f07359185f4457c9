"""Which block comes at which place: a function of the place alone, so a run can continue at any place on any ranks.

An order maps the places 0, 1, 2, ... of the endless sequence of rows to indices of blocks; `len(order)` places are
one epoch.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from .packing import stable_seed

# Number of rows in which each corpus has its share; fewer would repeat a pattern, more would let one corpus lead.
_WINDOW = 64


class Shuffled:
    """Every epoch is a new permutation of all blocks, from seed and epoch; epochs follow without a gap."""

    def __init__(self, count: int, seed: int):
        self.count = count
        self.seed = seed
        # A batch may span two epochs.
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def __len__(self) -> int:
        return self.count

    def __call__(self, place: int) -> int:
        epoch, place_in_epoch = divmod(place, self.count)
        permutation = self._permutation(epoch)
        return int(permutation[place_in_epoch])

    def _permute(self, epoch: int) -> Tensor:
        return _random_order(self.count, stable_seed(self.seed, epoch))


class Carried:
    """Row b of a batch of `rows` reads its own contiguous share of the blocks, then the share of the next row."""

    def __init__(self, count: int, rows: int):
        self.count = count
        self.rows = rows
        self._share = max(1, count // rows)

    def __len__(self) -> int:
        return self.count

    def __call__(self, place: int) -> int:
        step, row = divmod(place, self.rows)
        block = row * self._share + step
        return block % self.count


class Mixed:
    """Blocks of several corpora, each shuffled on its own, in shares of tokens.

    An epoch has as many places as there are blocks. A corpus has its share of them, rounded to whole blocks, and has
    it in every window of about 64 places, too. A corpus with a larger share than its part of the blocks is read
    again, in another order; one with a smaller share continues in the next epoch. Without weights an epoch reads every
    block once.

    counts: blocks of each corpus; their indices follow one another in the same order.
    weights: one number per corpus, not negative, not all 0; None: the counts.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float] | None, seed: int):
        self._orders = []
        for corpus, count in enumerate(counts):
            self._orders.append(Shuffled(count, stable_seed(seed, corpus)))
        # The index of each corpus's first block.
        self._firsts = [0, *accumulate(counts)]
        self._length = sum(counts)
        self.seed = seed
        self.shares = apportion(self._length, counts if weights is None else weights)
        """Number of places of each corpus in an epoch."""
        num_windows = math.ceil(self._length / _WINDOW)
        # [windows + 1, corpora]: places that each corpus has had before a window of an epoch begins.
        self._places_before = np.outer(np.arange(num_windows + 1), self.shares) // num_windows
        # [windows + 1]: the place at which a window begins.
        self._begins = self._places_before.sum(axis=1)
        self._corpora = lru_cache(maxsize=4)(self._shuffle_window)

    def __len__(self) -> int:
        return self._length

    def __call__(self, place: int) -> int:
        epoch, place_in_epoch = divmod(place, self._length)
        window = int(np.searchsorted(self._begins, place_in_epoch, side="right")) - 1
        place_in_window = place_in_epoch - int(self._begins[window])
        corpora = self._corpora(epoch, window)
        corpus = corpora[place_in_window]
        # How many places this corpus has had: in earlier epochs, in earlier windows and in this one.
        before = epoch * self.shares[corpus]
        before += int(self._places_before[window, corpus])
        before += corpora[:place_in_window].count(corpus)
        block = self._orders[corpus](before)
        return self._firsts[corpus] + block

    def _shuffle_window(self, epoch: int, window: int) -> list[int]:
        """The corpus of each place of a window."""
        counts = self._places_before[window + 1] - self._places_before[window]
        corpora = torch.arange(len(counts)).repeat_interleave(torch.from_numpy(counts))
        order = _random_order(len(corpora), stable_seed(self.seed, epoch, window))
        return corpora[order].tolist()


def _random_order(count: int, seed: int) -> Tensor:
    """The numbers below `count` in the random order of a seed, int64 [count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(count, generator=generator)


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` split into whole numbers by weight: each rounded down, the rest given to the largest remainders."""
    exact = np.array(weights, dtype=np.float64) * (total / sum(weights))
    parts = np.floor(exact).astype(np.int64)
    largest_first = np.argsort(parts - exact, kind="stable")
    rest = total - int(parts.sum())
    parts[largest_first[:rest]] += 1
    return parts.tolist()
