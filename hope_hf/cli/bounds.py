"""What the value of a flag may be, checked where it is parsed, with one kind of sentence for every program."""

import argparse
import math
from dataclasses import dataclass

# No count, rate or number of seconds is larger than this: sums and products of such numbers overflow nothing.
LARGEST = 10**9
# Tokens of one text: the longest that anyone has trained on or evaluated, and less than what fills a machine's memory.
LONGEST = 2**24


@dataclass(frozen=True)
class Bounds:
    """The finite numbers that a flag admits, from `least` or above `above`, and to `most` or below `below`."""

    least: float | None = None
    above: float | None = None
    most: float = LARGEST
    below: float | None = None

    def admit(self, value: float) -> bool:
        """Whether `value` lies within; NaN never does."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and value <= self.most
        )

    def words(self, value: float = 0) -> str:
        """`of 0 or more and below 1`. The bound that all flags have is named to who exceeds it with `value`."""
        low = f"of {self.least:,} or more" if self.above is None else f"above {self.above:,}"
        if self.below is not None:
            return f"{low} and below {self.below:,}"
        if self.most == LARGEST and not LARGEST < value < math.inf:
            return low
        return f"from {self.least:,} to {self.most:,}" if self.above is None else f"{low} and at most {self.most:,}"


class Checked(argparse.Action):
    """Stores a value that is no empty word and lies within `bounds`; ValueError that names the flag for any other."""

    def __init__(self, option_strings, dest, bounds: Bounds | None = None, **options):
        super().__init__(option_strings, dest, **options)
        self.bounds = bounds

    def __call__(self, parser, namespace, values, option_string=None):
        for value in values if isinstance(values, list) else [values]:
            self._check(value)
        setattr(namespace, self.dest, values)

    def _check(self, value):
        name = self.option_strings[0] if self.option_strings else self.metavar
        if isinstance(value, str):
            if not value.strip():
                raise ValueError(f"{name} is {value!r}: give a value, or leave it out.")
            # Bytes of a command line that are no UTF-8 come as surrogates, which no report can hold.
            if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError(f"{name} {value!r} is not UTF-8 text: give another value.")
        elif not self.bounds.admit(value):
            kind = "whole number" if isinstance(value, int) else "number"
            raise ValueError(f"{name} is {value}: give a {kind} {self.bounds.words(value)}.")
