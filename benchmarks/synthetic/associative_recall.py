"""Multi-query associative recall: key-value pairs, then the keys in another order; the task is to recall their values.

The task of Arora et al. 2023 (Zoology, arXiv 2312.04927), which measures how much a state of a given size can hold.
There the distances of the asked keys follow a power law; here blanks are spread evenly between them. The accuracy of a
model without memory is at most 1 / number of values.

`rekeyed` adds what changes the meaning of keys inside a text: after the pairs, every key is given another name out of
the same alphabet, and values are asked by the new names.
"""

from functools import partial

import torch

from hope_hf.common.results import IGNORED

from .task import Batch, Task

PAIRS = (4, 8, 16, 32, 64)
RENAMED_PAIRS = (2, 4, 8)
# Tokens per pair: two when written, two when asked, and four blanks per asked pair.
TOKENS_PER_PAIR = 8
SYMBOLS_PER_PAIR = 4


def _distinct(rows: int, symbols: int, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` different ids below `symbols` in every row, in random order, [rows, count] int64."""
    return torch.rand(rows, symbols, generator=generator).argsort(-1)[:, :count]


def recall_batch(
    batch_size: int, pairs: int, symbols: int, generator: torch.Generator, length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, both [batch_size, length] int64: `k v` for every pair, then `k v` in another order.

    Keys are the ids below `symbols`, values those from `symbols` on; within a row all keys differ, and so do all
    values. Only the values of the second half are scored: elsewhere the label is -100. Labels are not shifted. With a
    `length` above 4 * pairs, blanks (id 2 * symbols) are placed at random between the pairs of the second half.
    """

    keys, values = (_distinct(batch_size, symbols, pairs, generator) for _ in range(2))
    values, order = symbols + values, _distinct(batch_size, pairs, pairs, generator)
    written = torch.stack([keys, values], -1).flatten(1)
    asked = torch.stack([keys.gather(1, order), values.gather(1, order)], -1).flatten(1)
    labels = torch.full_like(written, IGNORED), asked.clone()
    labels[1][:, 0::2] = IGNORED
    input_ids, labels = torch.cat([written, asked], 1), torch.cat(labels, 1)
    if length is None or length == 4 * pairs:
        return input_ids, labels
    return _with_blanks(input_ids, labels, pairs, 2 * symbols, length, generator)


def _with_blanks(
    input_ids: torch.Tensor, labels: torch.Tensor, pairs: int, blank: int, length: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, blanks = len(input_ids), length - 4 * pairs
    # Each blank goes before one of the asked pairs or after the last one.
    gaps = torch.randint(pairs + 1, (rows, blanks), generator=generator)
    before = torch.nn.functional.one_hot(gaps, pairs + 1).sum(1)[:, :pairs].cumsum(1)
    asked = 2 * pairs + before.repeat_interleave(2, 1) + torch.arange(2 * pairs)
    places = torch.cat([torch.arange(2 * pairs).expand(rows, -1), asked], 1)
    return (
        torch.full((rows, length), blank).scatter(1, places, input_ids),
        torch.full((rows, length), IGNORED).scatter(1, places, labels),
    )


def _pairs(sizes: tuple[int, ...], bin: int | None, generator: torch.Generator) -> int:
    """The size of index `bin`, or any of them with equal chance."""
    return sizes[int(torch.randint(len(sizes), (), generator=generator)) if bin is None else bin]


def draw(rows: int, generator: torch.Generator, bin: int | None, *, sizes: tuple[int, ...], symbols: int) -> Batch:
    """Samples that are scored at the asked keys: the next token is the value. [rows, 8 * pairs - 1].

    All rows of a batch have the same number of pairs, one of `sizes`; all sizes are equally likely in training.
    """
    pairs = _pairs(sizes, bin, generator)
    input_ids, labels = recall_batch(rows, pairs, symbols, generator, TOKENS_PER_PAIR * pairs)
    targets = labels[:, 1:]
    return Batch(input_ids[:, :-1], targets, targets != IGNORED)


def rekeyed(rows: int, generator: torch.Generator, bin: int | None, *, sizes: tuple[int, ...]) -> Batch:
    """`k v` for every pair, a mark, `old new` for every key, a mark, and `new v`: scored at the new keys of the end.

    Keys are the ids below K, the largest of `sizes`, values those from K on, and the mark is 2 K. The new keys of N
    pairs are N different keys, so that many a name means one thing before its renaming and another after it. In half
    of the texts for training every key keeps its name, which teaches recall before renaming. [rows, 6 N + 1].
    """
    pairs, symbols = _pairs(sizes, bin, generator), max(sizes)
    keys, values, new = (_distinct(rows, symbols, pairs, generator) for _ in range(3))
    if bin is None:
        new = torch.where(torch.rand(rows, 1, generator=generator) < 0.5, keys, new)
    values, told, asked = symbols + values, *(_distinct(rows, pairs, pairs, generator) for _ in range(2))

    def part(first: torch.Tensor, second: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return torch.stack([first.gather(1, order), second.gather(1, order)], -1).flatten(1)

    mark, written = torch.full((rows, 1), 2 * symbols), torch.arange(pairs).expand(rows, -1)
    ids = torch.cat([part(keys, values, written), mark, part(keys, new, told), mark, part(new, values, asked)], 1)
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[:, -2 * pairs :: 2] = True
    return Batch(ids[:, :-1], ids[:, 1:], mask[:, :-1])


def associative_recall() -> dict[str, Task]:
    """`mqar-4` to `mqar-64`: that many pairs in 8 times as many tokens, out of 4 times as many keys and values.

    `mqar` trains on all these sizes and is tested on each, with 64 keys and 64 values: a model trained on 64 pairs out
    of 256 only does not learn them in a few thousand steps. Arora et al. mix their sizes, too. `rekeyed` trains on 2,
    4 and 8 renamed pairs; with 4, 8 and 16 no model learns any of them in 2,000 steps.
    """
    renamed = Task(
        name="rekeyed",
        vocab_size=2 * max(RENAMED_PAIRS) + 1,
        bins=tuple(map(str, RENAMED_PAIRS)),
        draw=partial(rekeyed, sizes=RENAMED_PAIRS),
        max_train_steps=3000,
        batch_size=64,
    )
    kinds = {f"mqar-{pairs}": ((pairs,), SYMBOLS_PER_PAIR * pairs) for pairs in PAIRS} | {"mqar": (PAIRS, max(PAIRS))}
    return {"rekeyed": renamed} | {
        name: Task(
            name=name,
            vocab_size=2 * symbols + 1,
            bins=tuple(str(TOKENS_PER_PAIR * pairs) for pairs in sizes),
            draw=partial(draw, sizes=sizes, symbols=symbols),
            max_train_steps=2000,
            batch_size=64,
        )
        for name, (sizes, symbols) in kinds.items()
    }
