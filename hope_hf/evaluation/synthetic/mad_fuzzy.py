"""Fuzzy in-context recall of MAD (Poli et al. 2024): keys and values are words of one to three symbols."""

import random

import torch

from .task import Batch

LONGEST_WORD = 3


def draw_fuzzy_recall(
    rows: int, generator: torch.Generator, bin: int | None, *, symbols: int = 16, length: int = 128
) -> Batch:
    """Keys of 1 to 3 different symbols with values of 1 to 3, the last pair a repetition; [rows, length].

    The lower symbols are for keys, the next ones for values, and the last is a filler that pads the row on the left. A
    key has one value within a row. The values of keys that have occurred before are scored; test keys have three
    symbols. In training, keys have all lengths and every next token is scored.
    """
    chance = random.Random(int(torch.randint(2**62, (), generator=generator)))
    training = bin is None
    samples = [fuzzy_sample(chance, training, symbols, length + 1) for _ in range(rows)]
    tokens = torch.tensor([tokens for tokens, _ in samples])
    mask = torch.ones_like(tokens, dtype=torch.bool) if training else torch.tensor([asked for _, asked in samples])
    return Batch(tokens[:, :-1], tokens[:, 1:], mask[:, 1:])


def fuzzy_sample(chance: random.Random, training: bool, symbols: int, length: int) -> tuple[list[int], list[bool]]:
    """Tokens of a row, and which of them are asked; both `length` long."""
    filler = symbols - 1
    key_symbols, value_symbols = range(filler // 2), range(filler // 2, filler)

    def new_key() -> tuple[int, ...]:
        size = chance.randint(1, LONGEST_WORD) if training else LONGEST_WORD
        return tuple(chance.sample(key_symbols, size))

    def new_value() -> tuple[int, ...]:
        return tuple(chance.sample(value_symbols, chance.randint(1, LONGEST_WORD)))

    asked_key, asked_value = new_key(), new_value()
    repeated = len(asked_key) + len(asked_value)
    values = {asked_key: asked_value}
    tokens, asked, seen = [], [], set()

    def write(key: tuple[int, ...]):
        if key not in values:
            values[key] = new_value()
        value = values[key]
        tokens.extend(key + value)
        asked.extend([False] * len(key) + [key in seen] * len(value))
        seen.add(key)

    # From here on the pair that is asked at the end is written, if it has not occurred yet; there is room for it.
    due = chance.randrange(length - 1 - repeated - 4 * LONGEST_WORD)
    while len(tokens) < length - 1 - repeated - 2 * LONGEST_WORD:
        write(asked_key if len(tokens) >= due and asked_key not in seen else new_key())
    write(asked_key)
    padding = length - len(tokens)
    return [filler] * padding + tokens, [False] * padding + asked
