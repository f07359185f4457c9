"""State tracking: after every symbol of a word over a permutation group, name the product of the symbols so far.

The word problems of Merrill et al. 2024 (arXiv 2404.08819). S3, the 6 permutations of three things, is solvable, and a
recurrence with eigenvalues from -1 to 1 can follow it (Grazzi et al. 2024, arXiv 2411.12537). A5, the 60 even
permutations of five things, is the smallest group that is not: models whose depth alone computes, such as softmax
attention, cannot follow it over any length, and neither can diagonal recurrences. Words of up to 32 symbols are
trained on (bin 0), words of up to 64 only tested.
"""

from functools import partial
from itertools import permutations

import torch
from torch import Tensor

from .task import Batch, Task

LENGTHS = (32, 64)


def is_even(permutation: tuple[int, ...]) -> bool:
    """Whether the permutation is a product of an even number of swaps."""
    inversions = sum(a > b for index, a in enumerate(permutation) for b in permutation[index + 1 :])
    return inversions % 2 == 0


def products(elements: list[tuple[int, ...]]) -> Tensor:
    """The group's table [n, n] int64: the index of `first` followed by `second`, for each pair of indices."""
    index = {element: place for place, element in enumerate(elements)}
    return torch.tensor([[index[tuple(second[i] for i in first)] for second in elements] for first in elements])


GROUPS = {
    "s3": products(list(permutations(range(3)))),
    "a5": products([element for element in permutations(range(5)) if is_even(element)]),
}


def draw(rows: int, generator: torch.Generator, bin: int | None, *, table: Tensor) -> Batch:
    """Words of uniformly drawn elements, as long as the bin's longest; every position is scored, [rows, length]."""
    word = torch.randint(len(table), (rows, LENGTHS[bin or 0]), generator=generator)
    states = [word[:, 0]]
    for symbol in word[:, 1:].unbind(1):
        states.append(table[states[-1], symbol])
    return Batch(word, torch.stack(states, 1), torch.ones_like(word, dtype=torch.bool))


def state_tracking() -> dict[str, Task]:
    """`s3` and `a5`."""
    return {
        name: Task(name, len(table), tuple(map(str, LENGTHS)), partial(draw, table=table))
        for name, table in GROUPS.items()
    }
