"""Bounds on the values of flags, checked by the parser, with the same error message in every program."""

import argparse
import math
from dataclasses import dataclass

# The largest count, rate or number of seconds: sums and products of such numbers do not overflow.
LARGEST = 10**9
# The most tokens of one text: the longest trained on or evaluated so far, and still within a machine's memory.
LONGEST = 2**24


@dataclass(frozen=True)
class Bounds:
    """The finite numbers that a flag accepts: from `least` or above `above`, up to `most` or below `below`."""

    least: float | None = None
    above: float | None = None
    most: float = LARGEST
    below: float | None = None

    def admit(self, value: float) -> bool:
        """Whether `value` is within the bounds; NaN never is."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and value <= self.most
        )

    def words(self, value: float = 0) -> str:
        """The bounds in words: `of 0 or more and below 1`. `LARGEST` is named only if `value` exceeds it."""
        low = f"of {self.least:,} or more" if self.above is None else f"above {self.above:,}"
        if self.below is not None:
            return f"{low} and below {self.below:,}"
        if self.most == LARGEST and not LARGEST < value < math.inf:
            return low
        return f"from {self.least:,} to {self.most:,}" if self.above is None else f"{low} and at most {self.most:,}"


class Checked(argparse.Action):
    """Stores a value that is not blank and is within `bounds`; otherwise ValueError that names the flag."""

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
            # Bytes of a command line that are not UTF-8 become surrogates, which cannot be written to a report.
            if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError(f"{name} {value!r} is not UTF-8 text: give another value.")
        elif not self.bounds.admit(value):
            kind = "whole number" if isinstance(value, int) else "number"
            raise ValueError(f"{name} is {value}: give a {kind} {self.bounds.words(value)}.")
