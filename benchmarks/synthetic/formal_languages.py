"""Formal languages: after every prefix of a word, predict which symbols may come next and whether the word may end.

The tasks of Bhattamishra et al. 2020 (arXiv 2009.11264) that Irie et al. 2023 (arXiv 2310.16076) give fast-weight
models: parity, (aa)*, (abab)*, a^n b^n, a^n b^n c^n and shuffle-2. A word counts as right only if the set of next
symbols is right after every one of its prefixes. Words of 2 to 50 symbols are trained on (bin 0), longer ones only
tested (bin 1: 51 to 100).

The end of the word is one more symbol of the set, in all languages. For parity, (aa)* and (abab)* those papers predict
only one bit, whether the prefix is itself a word: the end symbol here. So parity's label after `1011` is {0, 1},
without the end, since three ones are odd; the bits of 0 and 1 are always on, the end's bit is the parity. In (aa)* the
bit of `a` is always on, in (abab)* the other bits alternate, and shuffle-2 may end where both counters are zero.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from .task import Batch, Task

SHORTEST = 2
TRAINED_LENGTH = 50


@dataclass(frozen=True)
class Language:
    """A formal language over the symbols 0 to `len(alphabet)` - 1; the end of a word is symbol `len(alphabet)`.

    alphabet: how the symbols are written, one character each.
    step: words have lengths divisible by it.
    word: `word(length, generator)` is a random word of that length, [length] int64.
    next_symbols: `next_symbols(word)` is a bool [length, symbols + 1], the set after each of its prefixes.
    """

    alphabet: str
    step: int
    word: Callable[[int, torch.Generator], Tensor]
    next_symbols: Callable[[Tensor], Tensor]


def draw(rows: int, generator: torch.Generator, bin: int | None, *, language: Language, ends: list[int]) -> Batch:
    """Words whose lengths are uniform over those of the bin; shorter ones are padded on the right, unscored.

    `ends` are the longest lengths of the bins. Training (`None`) is bin 0.
    """
    longest = ends[bin or 0]
    shortest = SHORTEST if not bin else ends[bin - 1] + 1
    lengths = [n for n in range(shortest, longest + 1) if n % language.step == 0]
    chosen = torch.randint(len(lengths), (rows,), generator=generator).tolist()
    words = [language.word(lengths[index], generator) for index in chosen]
    end, width = len(language.alphabet), max(len(word) for word in words)
    # Words are padded with the end symbol, which no prefix can see.
    input_ids = torch.full((rows, width), end)
    targets = torch.zeros(rows, width, end + 1, dtype=torch.bool)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, word in enumerate(words):
        input_ids[row, : len(word)] = word
        targets[row, : len(word)] = language.next_symbols(word)
        mask[row, : len(word)] = True
    return Batch(input_ids, targets, mask)


def formal_languages(ends: list[int] | None = None) -> dict[str, Task]:
    """The tasks by name. `ends`: the longest words of the bins beyond the training's (default: 100).

    Trained words and those of the first of these bins must be right for a training to end early; the longer ones are
    only tested.

    Raises ValueError for an end that holds no words of some language.
    """
    ends = [TRAINED_LENGTH, *(ends or [2 * TRAINED_LENGTH])]
    if any(longer - shorter < 4 for shorter, longer in pairwise(ends)):
        raise ValueError(
            f"--lengths {','.join(map(str, ends[1:]))} does not suit the formal languages, whose training words have "
            f"2 to {TRAINED_LENGTH} symbols: write ascending lengths at least 4 apart, from {TRAINED_LENGTH + 4} on."
        )
    bins = tuple(f"{shorter + 1}-{end}" for shorter, end in pairwise([SHORTEST - 1, *ends]))
    return {
        name: Task(name, len(language.alphabet) + 1, bins, partial(draw, language=language, ends=ends), checked=2)
        for name, language in LANGUAGES.items()
    }


def _sets(*columns: Tensor) -> Tensor:
    return torch.stack(columns, -1)


def _always(word: Tensor) -> Tensor:
    return torch.ones(len(word), dtype=torch.bool)


def _parity_word(length: int, generator: torch.Generator) -> Tensor:
    bits = torch.randint(2, (length,), generator=generator)
    bits[-1] = bits[:-1].sum() % 2
    return bits


def _parity_next(word: Tensor) -> Tensor:
    return _sets(_always(word), _always(word), word.cumsum(0) % 2 == 0)


def _repeated(symbols: list[int], length: int, generator: torch.Generator) -> Tensor:
    return torch.tensor(symbols).repeat(length // len(symbols))


def _aa_next(word: Tensor) -> Tensor:
    read = torch.arange(1, len(word) + 1)
    return _sets(_always(word), read % 2 == 0)


def _abab_next(word: Tensor) -> Tensor:
    read = torch.arange(1, len(word) + 1)
    return _sets(read % 2 == 0, read % 2 == 1, read % 4 == 0)


def _blocks(symbols: int, length: int, generator: torch.Generator) -> Tensor:
    return torch.arange(symbols).repeat_interleave(length // symbols)


def _blocks_next(symbols: int, word: Tensor) -> Tensor:
    """The first block may go on or end at any symbol; after that every block's length is known."""
    counts = torch.nn.functional.one_hot(word, symbols).cumsum(0)
    full = counts == counts[:, :1]
    columns = [counts[:, 1] == 0]
    for symbol in range(1, symbols):
        columns.append(full[:, symbol - 1] & ~full[:, symbol])
    columns.append(full[:, -1])
    return _sets(*columns)


def dyck_word(pairs: int, generator: torch.Generator) -> Tensor:
    """Brackets 0 (open) and 1 (close), uniform over all balanced words of that length, [2 * pairs] int64.

    By the cycle lemma: of the rotations of `pairs` + 1 openings and `pairs` closings exactly one stays above zero.
    """
    steps = torch.ones(2 * pairs + 1, dtype=torch.int64)
    steps[torch.randperm(2 * pairs + 1, generator=generator)[:pairs]] = -1
    heights = steps.cumsum(0)
    # The last of the lowest points: after it the walk stays above.
    lowest = len(steps) - 1 - heights.flip(0).argmin()
    return (steps.roll(-int(lowest) - 1)[1:] < 0).long()


def _shuffle_word(length: int, generator: torch.Generator) -> Tensor:
    """Two balanced words, of `()` and of `[]`, mixed at random positions."""
    pairs = length // 2
    round_pairs = int(torch.randint(2, (pairs,), generator=generator).sum())
    is_round = torch.zeros(length, dtype=torch.bool)
    is_round[torch.randperm(length, generator=generator)[: 2 * round_pairs]] = True
    word = torch.empty(length, dtype=torch.int64)
    word[is_round] = dyck_word(round_pairs, generator)
    word[~is_round] = 2 + dyck_word(pairs - round_pairs, generator)
    return word


def _shuffle_next(word: Tensor) -> Tensor:
    counts = torch.nn.functional.one_hot(word, 4).cumsum(0)
    open_round, open_square = counts[:, 0] > counts[:, 1], counts[:, 2] > counts[:, 3]
    return _sets(_always(word), open_round, _always(word), open_square, ~open_round & ~open_square)


LANGUAGES = {
    "parity": Language("01", 1, _parity_word, _parity_next),
    "aa": Language("a", 2, partial(_repeated, [0, 0]), _aa_next),
    "abab": Language("ab", 4, partial(_repeated, [0, 1, 0, 1]), _abab_next),
    "anbn": Language("ab", 2, partial(_blocks, 2), partial(_blocks_next, 2)),
    "anbncn": Language("abc", 3, partial(_blocks, 3), partial(_blocks_next, 3)),
    "shuffle-2": Language("()[]", 2, _shuffle_word, _shuffle_next),
}
