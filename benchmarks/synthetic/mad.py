"""Five tasks of MAD (Poli et al. 2024, arXiv 2403.17844) in their basic sizes.

The tasks train as MAD's do: recall on every next token, though only some are tested, and compression through a decoder
that sees only the model's last state. Differences: fresh samples, width 64 by default, and accuracy is the mean over
samples of the share of right symbols, while MAD averages over symbols' classes.
"""

import random
from functools import partial

import torch
from torch import Tensor, nn

from .task import Batch, LogitsOf, Task

# The memorised table is part of the task, so it is the same in every run.
TABLE_SEED = 20240326
# Symbols of a key or a value in fuzzy recall.
LONGEST_WORD = 3


def draw_in_context_recall(
    rows: int, generator: torch.Generator, bin: int | None, *, symbols: int = 16, pairs: int = 64
) -> Batch:
    """Random key-value pairs with few keys, whose value never changes within a row; [rows, 2 * pairs - 1].

    Keys are the lower half of the symbols, values the upper. The last pair's key has occurred before. The values of
    all keys that have occurred before are scored; in training, every next token is scored.
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
    """Random symbols, then a signal after which all symbols are expected; [rows, length]."""
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
    """Tokens of a row, and which of them are values of repeated keys; both `length` long."""
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

    # From this length on, the last pair is written next if it has not occurred yet; there is room for it.
    due = chance.randrange(length - 1 - repeated - 4 * LONGEST_WORD)
    while len(tokens) < length - 1 - repeated - 2 * LONGEST_WORD:
        write(asked_key if len(tokens) >= due and asked_key not in seen else new_key())
    write(asked_key)
    padding = length - len(tokens)
    return [filler] * padding + tokens, [False] * padding + asked


class LastStateDecoder(nn.Module):
    """A causal language model without its head, and a small network that reads its last state at every position.

    The auto-encoder of MAD (Poli et al. 2024): state plus sinusoidal position, two layers as wide as the model, then
    logits. The model's own head is not used.
    """

    def __init__(self, model: nn.Module, length: int, symbols: int):
        super().__init__()
        width = model.config.hidden_size
        self.model = model
        self.register_buffer("positions", sinusoids(length, width).to(model.dtype), persistent=False)
        self.decoder = nn.Sequential(
            nn.RMSNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.RMSNorm(width), nn.Linear(width, width), nn.GELU(),
            nn.RMSNorm(width), nn.Linear(width, symbols),
        ).to(model.dtype)  # fmt: skip

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, symbols] of the symbols at all positions, from token ids [B, T] with T at most `length`."""
        states = self.model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
        return self.decoder(states[:, -1:] + self.positions[: input_ids.shape[1]])


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines of wave lengths from 2 pi to 10,000 times that, [length, width] float32; width is even."""
    frequencies = 10_000.0 ** -torch.linspace(0, 1, width // 2)
    angles = torch.arange(length)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


def mad() -> dict[str, Task]:
    """The five tasks by name, in MAD's basic sizes."""
    decoder = partial(LastStateDecoder, length=32, symbols=16)
    # Name -> (draw, symbols, tokens, what is attached to the model).
    basic = {
        "mad-compression": (draw_compression, 16, 32, decoder),
        "mad-recall": (draw_in_context_recall, 16, 128, LogitsOf),
        "mad-fuzzy-recall": (draw_fuzzy_recall, 16, 128, LogitsOf),
        "mad-selective-copying": (draw_selective_copying, 16, 256, LogitsOf),
        "mad-memorisation": (draw_memorisation, 256, 32, LogitsOf),
    }
    return {
        name: Task(name, symbols, (str(length),), draw, attach, 2000, 64)
        for name, (draw, symbols, length, attach) in basic.items()
    }
