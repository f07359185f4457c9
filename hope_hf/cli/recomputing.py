"""`--gradient_checkpointing`, of trainer and planner: which activations the backward pass computes again."""

from dataclasses import dataclass, field
from typing import Literal

from .bounds import Checked

MOST_BLOCKS = 10_000
# What blocks call their sequence mixer; a hybrid has one of them in each block.
MIXERS = frozenset("mixer self_attn linear_attn attn attention self_attention mamba temporal_block".split())


@dataclass(frozen=True)
class Recomputed:
    """What is computed again.

    Attributes:
        part: of a block: nothing, all of it, or its sequence mixer (attention, memories).
        every: of the blocks, the first and every N-th one after it.
    """

    part: Literal["none", "block", "mixer"]
    every: int = 1


# True and False: the flag was a switch.
NAMES = {
    "none": Recomputed("none"), "false": Recomputed("none"), "block": Recomputed("block"),
    "true": Recomputed("block"), "mixer": Recomputed("mixer"),
}  # fmt: skip


def recomputing_flag():
    """The dataclass field of the flag, a string; without a value it means `block`."""
    text = (
        "What the backward pass computes again, which takes less memory and more time: none, block (every block; also "
        "without a value), mixer (attention or memories of every block) or every:N (every N-th block)."
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
