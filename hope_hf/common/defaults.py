"""Defaults that follow the size of the text, for a new model trained without a recipe on `--train_file`.

A small text needs many small steps at a high rate, several passes and a small vocabulary. `run_clm.py` and the planner
take the same values from `defaults_of`; a flag that is given overrides its own.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

# Bytes of a text below which the values of small texts apply: those of the demo, whose text has 8 MB.
SMALL = 10_000_000
# Passes over a text are the root of this over its bytes: 300 KB were best after 3 to 4, later passes only learned them
# by heart.
READ_ONCE = 5_000_000
MOST_EPOCHS = 10
# The widest model that was trained at the rate; wider ones get less, in proportion.
WIDTH, RATE = 256, 2e-3
VOCABULARY = 1024
VOCAB_SIZE = "vocab_size"
"""Not a flag: the entries of a tokenizer that is made from the text. `--config_overrides vocab_size=N` gives it."""


@dataclass(frozen=True)
class Default:
    """A value that was chosen, and why."""

    value: int | float
    reason: str


def defaults_of(size: int, hidden_size: int, given: Collection[str]) -> dict[str, Default]:
    """The defaults of a new model by flag, without those `given`; empty where the flags' own defaults apply.

    Args:
        size: bytes of the training text's files.
        hidden_size: the model's width; 0 where its config names none.
        given: names of flags that the user gave on the command line or in the launch file. `tokenizer_name` also gives
            the vocabulary, and `max_train_steps` the number of epochs.
    """
    if size >= SMALL:
        return {}
    epochs = max(1, min(MOST_EPOCHS, round(math.sqrt(READ_ONCE / size))))
    rate = float(f"{RATE * WIDTH / max(WIDTH, hidden_size):.1g}")
    table = {
        "block_size": Default(256, "a small text has few long rows"),
        "per_device_train_batch_size": Default(4, "small steps, so that there are many of them"),
        "learning_rate": Default(rate, f"small steps bear a high rate: {RATE:g} up to {WIDTH} channels, wider less"),
        "num_train_epochs": Default(
            float(epochs), "more passes over a smaller text, and no more than teach something"
        ),
        VOCAB_SIZE: Default(VOCABULARY, "entries of the tokenizer made from the text: rare ones are not learned"),
    }
    for name in given:
        table.pop(name, None)
    if "tokenizer_name" in given:
        table.pop(VOCAB_SIZE, None)
    if "max_train_steps" in given:
        table.pop("num_train_epochs", None)
    return table


def default_lines(defaults: dict[str, Default]) -> list[str]:
    """A line for each default: the flag with its value, and the reason."""
    flags = [_as_flag(name, default.value) for name, default in defaults.items()]
    width = max(map(len, flags), default=0)
    lines = []
    for flag, default in zip(flags, defaults.values(), strict=True):
        lines.append(f"{flag:<{width}}  {default.reason}")
    return lines


def _as_flag(name: str, value: int | float) -> str:
    return f"--config_overrides {name}={value}" if name == VOCAB_SIZE else f"--{name} {value:g}"
