"""The moments of a step at which its memory may be largest."""

from collections import Counter
from dataclasses import dataclass

FORWARD, LOSS, BLOCKS, BACKWARD, UPDATE = "forward", "loss", "blocks", "backward", "update"


@dataclass(frozen=True)
class Moment:
    """A moment's name, and bytes by category."""

    name: str
    sizes: Counter[str]
