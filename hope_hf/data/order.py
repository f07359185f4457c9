"""Which block comes at which place: a function of the place alone, so a run can continue at any place on any ranks.

An order maps the places 0, 1, 2, ... of the endless sequence of rows to indices of blocks; `len(order)` places are
one epoch.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .packing import stable_seed

# Number of rows in which each corpus has its share; fewer would repeat a pattern, more would let one corpus lead.
_WINDOW = 64


class Shuffled:
    """Every epoch is a new permutation of all blocks, from seed and epoch; epochs follow without a gap."""

    def __init__(self, count: int, seed: int):
        self.count, self.seed = count, seed
        # A batch may span two epochs.
        self._permutation = lru_cache(maxsize=2)(self._permute)

    def __len__(self) -> int:
        return self.count

    def __call__(self, place: int) -> int:
        epoch, place = divmod(place, self.count)
        return int(self._permutation(epoch)[place])

    def _permute(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch))
        return torch.randperm(self.count, generator=generator)


class Carried:
    """Row b of a batch of `rows` reads its own contiguous share of the blocks, then the share of the next row."""

    def __init__(self, count: int, rows: int):
        self.count, self.rows = count, rows

    def __len__(self) -> int:
        return self.count

    def __call__(self, place: int) -> int:
        step, row = divmod(place, self.rows)
        share = max(1, self.count // self.rows)
        return (row * share + step) % self.count


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
        self._firsts = np.cumsum([0, *counts])
        self._length = sum(counts)
        self.seed = seed
        self.shares = apportion(self._length, counts if weights is None else weights)
        """Number of places of each corpus in an epoch."""
        windows = -(-self._length // _WINDOW)
        # [windows + 1, corpora]: places that each corpus has had before a window of an epoch begins.
        self._before = np.arange(windows + 1)[:, None] * np.array(self.shares) // windows
        self._begins = self._before.sum(axis=1)
        self._window = lru_cache(maxsize=4)(self._fill)

    def __len__(self) -> int:
        return self._length

    def __call__(self, place: int) -> int:
        epoch, place = divmod(place, self._length)
        window = int(np.searchsorted(self._begins, place, side="right")) - 1
        # The block is the nth that this corpus has had.
        corpus, nth = self._window(epoch, window)[place - self._begins[window]]
        nth += epoch * self.shares[corpus] + self._before[window, corpus]
        order = self._orders[corpus]
        return int(self._firsts[corpus]) + order(int(nth))

    def _fill(self, epoch: int, window: int) -> list[tuple[int, int]]:
        """(corpus, number of its earlier places in this window) for each place of a window."""
        counts = self._before[window + 1] - self._before[window]
        corpora = torch.arange(len(counts)).repeat_interleave(torch.from_numpy(counts))
        generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch, window))
        shuffled = corpora[torch.randperm(len(corpora), generator=generator)]
        earlier = [0] * len(counts)
        places = []
        for corpus in shuffled.tolist():
            places.append((corpus, earlier[corpus]))
            earlier[corpus] += 1
        return places


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` split into whole numbers by weight: each rounded down, the rest given to the largest remainders."""
    exact = np.array(weights, dtype=np.float64) * (total / sum(weights))
    parts = np.floor(exact).astype(np.int64)
    for index in np.argsort(parts - exact, kind="stable")[: total - int(parts.sum())]:
        parts[index] += 1
    return parts.tolist()
