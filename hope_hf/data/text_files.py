"""The documents of a .txt file: the whole, or the text between lines that hold only `<|endoftext|>`.

One of more than `LONGEST` characters is read as several of about `PART`, cut at blank lines where there are any.
"""

import io
import re
from collections.abc import Iterator
from typing import BinaryIO

from .vocabulary import END_OF_TEXT

# A document of more than LONGEST characters is read as several of about PART characters.
LONGEST = 1 << 24
PART = 1 << 17
_LONGEST_LINE = 1 << 16
_BREAKS = [re.compile(pattern) for pattern in (r"\n[ \t\r]*+\n", r"\n", r"\s")]


def documents_of_text(stream: BinaryIO) -> Iterator[str]:
    """The documents of a .txt file in UTF-8. Line ends are kept, a byte order mark is dropped.

    Raises UnicodeDecodeError, and ValueError for what is UTF-16 or damaged.
    """
    lines = []
    length = 0
    longest = LONGEST
    for line in _lines(stream):
        if line.strip() == END_OF_TEXT:
            yield "".join(lines)
            lines = []
            length = 0
            longest = LONGEST
            continue
        lines.append(line)
        length += len(line)
        if length > longest:
            *parts, rest = _cut("".join(lines))
            yield from parts
            lines = [rest]
            length = len(rest)
            longest = 2 * PART
    yield "".join(lines)


def _lines(stream: BinaryIO) -> Iterator[str]:
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    while line := text.readline(_LONGEST_LINE):
        # UTF-16 without a mark is UTF-8 with a NUL in every character; a disk that failed leaves a tail of them.
        if "\0" in line and 3 * line.count("\0") >= len(line):
            raise ValueError("it holds NUL characters, as UTF-16 does, so convert it to UTF-8")
        if END_OF_TEXT in line:
            # A marker may stand between line ends that only splitlines recognizes.
            yield from line.splitlines(keepends=True)
        else:
            yield line


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * PART:
        end = _break_between(text, start + PART, start + 2 * PART)
        yield text[start:end]
        start = end
    yield text[start:]


def _break_between(text: str, first: int, last: int) -> int:
    """The place after the first blank line, line or word that ends between two places; else the last place."""
    for pattern in _BREAKS:
        match = pattern.search(text, first, last)
        if match:
            return match.end()
    return last
