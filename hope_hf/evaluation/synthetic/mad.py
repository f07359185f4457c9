"""Five tasks of MAD (Poli et al. 2024, arXiv 2403.17844) in their basic sizes.

The tasks train as MAD's do: recall on every next token, though only some are tested, and compression through a decoder
that sees only the model's last state. Differences: fresh samples, width 64 by default, and accuracy is the mean over
samples of the share of right symbols, while MAD averages over symbols' classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .last_state_decoder import LastStateDecoder
from .mad_fuzzy import draw_fuzzy_recall
from .task import Batch, LogitsOf, Task

# The table that is memorised is part of the task: the same in every run.
TABLE_SEED = 20240326


def draw_in_context_recall(
    rows: int, generator: torch.Generator, bin: int | None, *, symbols: int = 16, pairs: int = 64
) -> Batch:
    """Random key-value pairs with few keys, whose value never changes within a row; [rows, 2 * pairs - 1].

    Keys are the lower half of the symbols, values the upper. The last pair's key has occurred before. The values of
    all keys that have are scored; in training, every next token is.
    """
    half = symbols // 2
    table = half + torch.randint(half, (rows, half), generator=generator)
    keys = torch.randint(half, (rows, pairs), generator=generator)
    present = torch.nn.functional.one_hot(keys[:, :-1], half).sum(1) > 0
    keys[:, -1] = torch.rand(rows, half, generator=generator).where(present, -1.0).argmax(1)
    occurrence = torch.nn.functional.one_hot(keys, half).cumsum(1).gather(2, keys.unsqueeze(-1)).squeeze(-1)
    tokens = torch.stack([keys, table.gather(1, keys)], -1).flatten(1)
    asked = torch.stack([torch.zeros_like(keys, dtype=torch.bool), occurrence > 1], -1).flatten(1)
    mask = torch.ones_like(asked) if bin is None else asked
    return Batch(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])


def draw_selective_copying(
    rows: int, generator: torch.Generator, bin: int | None, *, symbols: int = 16, length: int = 256, copied: int = 16
) -> Batch:
    """16 symbols with blanks between them, a signal, then blanks where the symbols are asked; [rows, length].

    The last two symbols are the blank and the signal. Blanks come before symbols; there are none between the last
    symbol and the signal.
    """
    blank, signal = symbols - 2, symbols - 1
    content = torch.randint(symbols - 2, (rows, copied), generator=generator)
    gaps = torch.randint(copied, (rows, length - 2 * copied - 1), generator=generator)
    places = torch.arange(copied) + torch.nn.functional.one_hot(gaps, copied).sum(1).cumsum(1)
    input_ids = torch.full((rows, length), blank).scatter(1, places, content)
    input_ids[:, -copied - 1] = signal
    targets = torch.zeros_like(input_ids)
    targets[:, -copied:] = content
    mask = torch.zeros_like(input_ids, dtype=torch.bool)
    mask[:, -copied:] = True
    return Batch(input_ids, targets, mask)


def draw_compression(
    rows: int, generator: torch.Generator, bin: int | None, *, symbols: int = 16, length: int = 32
) -> Batch:
    """Random symbols and a signal, at whose position all of them are asked; [rows, length]."""
    input_ids = torch.randint(symbols - 1, (rows, length), generator=generator)
    input_ids[:, -1] = symbols - 1
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    mask[:, -1] = False
    return Batch(input_ids, input_ids, mask)


def draw_memorisation(
    rows: int, generator: torch.Generator, bin: int | None, *, symbols: int = 256, length: int = 32
) -> Batch:
    """Keys of one fixed table, each followed by the signal where its value is asked; [rows, length].

    The values are never in the input: they can only be learned by training.
    """
    table = memorised_table(symbols)
    keys = torch.randint(len(table), (rows, length // 2), generator=generator)
    input_ids = torch.stack([keys, torch.full_like(keys, symbols - 1)], -1).flatten(1)
    targets = torch.stack([torch.zeros_like(keys), table[keys]], -1).flatten(1)
    return Batch(input_ids, targets, input_ids == symbols - 1)


def memorised_table(symbols: int) -> Tensor:
    """The value of every key, [(symbols - 1) // 2] int64: distinct ones from the upper symbols except the last."""
    keys, values = (symbols - 1) // 2, symbols - 1 - (symbols - 1) // 2
    order = torch.randperm(values, generator=torch.Generator().manual_seed(TABLE_SEED))
    return keys + order[:keys]


@dataclass(frozen=True)
class _Basic:
    draw: Callable
    symbols: int
    length: int
    attach: Callable = LogitsOf


BASIC = {
    "mad-compression": _Basic(draw_compression, 16, 32, partial(LastStateDecoder, length=32, symbols=16)),
    "mad-recall": _Basic(draw_in_context_recall, 16, 128),
    "mad-fuzzy-recall": _Basic(draw_fuzzy_recall, 16, 128),
    "mad-selective-copying": _Basic(draw_selective_copying, 16, 256),
    "mad-memorisation": _Basic(draw_memorisation, 256, 32),
}


def mad() -> dict[str, Task]:
    """The five tasks by name, in MAD's basic sizes."""
    return {
        name: Task(name, basic.symbols, (str(basic.length),), basic.draw, basic.attach, 2000, 64)
        for name, basic in BASIC.items()
    }
