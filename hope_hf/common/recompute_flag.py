"""The flag `--gradient_checkpointing`: what it says. `recompute.py` does it."""

from dataclasses import dataclass, field
from typing import Literal

from .flags import Checked

MOST_BLOCKS = 10_000


@dataclass(frozen=True)
class Recomputed:
    """What the backward pass recomputes.

    Attributes:
        part: nothing, whole blocks, or their sequence mixers (attention, memories).
        every: N recomputes the first block and every N-th block after it.
    """

    part: Literal["none", "block", "mixer"]
    every: int = 1


# `true` and `false` are accepted, because the flag was a switch once.
NAMES = {
    "none": Recomputed("none"), "false": Recomputed("none"), "block": Recomputed("block"),
    "true": Recomputed("block"), "mixer": Recomputed("mixer"),
}  # fmt: skip


def recomputing_flag():
    """The dataclass field of the flag, a string; without a value it means `block`."""
    text = (
        "Recompute activations in the backward pass (less memory, more time): none, block (every block; also without "
        "a value), mixer (attention or memories of every block) or every:N (every N-th block)."
    )
    return field(default="none", metadata={"help": text, "action": Checked, "nargs": "?", "const": "block"})


def parse_recomputed(value: str) -> Recomputed:
    """The meaning of the flag's value; ValueError for any other."""
    name, _, number = value.lower().partition(":")
    if name == "every" and number.isascii() and number.isdigit() and 0 < int(number[:9]) <= MOST_BLOCKS:
        return Recomputed("block", int(number[:9]))
    if value.lower() in NAMES:
        return NAMES[value.lower()]
    raise ValueError(
        f"--gradient_checkpointing is {value[:40]!r}: give none, block, mixer or every:N with N from 1 to "
        f"{MOST_BLOCKS:,}."
    )
