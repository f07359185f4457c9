"""The documents of a plain text file, read line by line.

A document is the file, or the text between lines that hold only `<|endoftext|>` if there are any. One of more than
`LONGEST` characters is read as several of about `PART`, cut at blank lines where there are any.
"""

import re
from collections.abc import Iterator

from .vocabulary import END_OF_TEXT

LONGEST = 1 << 24
PART = 1 << 17
_LONGEST_LINE = 1 << 16
_BREAKS = [re.compile(pattern) for pattern in (r"\n[ \t\r]*+\n", r"\n", r"\s")]


class UndecodableByte(ValueError):
    """A file is not UTF-8."""

    def __init__(self, place: int):
        super().__init__(f"byte {place}")
        self.place = place


def documents_of_text(path: str) -> Iterator[str]:
    """Line ends are kept, and a byte order mark is not text. Raises UndecodableByte."""
    lines, length, most = [], 0, LONGEST
    for line in _lines(path):
        if line.strip() == END_OF_TEXT:
            yield "".join(lines)
            lines, length, most = [], 0, LONGEST
            continue
        lines.append(line)
        length += len(line)
        if length > most:
            *parts, rest = _cut("".join(lines))
            yield from parts
            lines, length, most = [rest], len(rest), 2 * PART
    yield "".join(lines)


def _lines(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8-sig", newline="") as file:
        try:
            while line := file.readline(_LONGEST_LINE):
                # Ends of lines that only splitlines knows matter beside a marker alone.
                yield from line.splitlines(keepends=True) if END_OF_TEXT in line else (line,)
        except UnicodeDecodeError as error:
            raise UndecodableByte(file.buffer.tell() - len(error.object) + error.start) from error


def _cut(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > 2 * PART:
        window = start + PART, start + 2 * PART
        found = next(filter(None, (pattern.search(text, *window) for pattern in _BREAKS)), None)
        end = found.end() if found else window[1]
        yield text[start:end]
        start = end
    yield text[start:]
