"""The documents of a .txt file: the whole, or the text between lines that hold only `<|endoftext|>`.

One of more than `LONGEST` characters is read as several of about `PART`, cut at blank lines where there are any.
"""

import re
from collections.abc import Iterator

import pyarrow as pa

from .compressed import open_text
from .vocabulary import END_OF_TEXT

# Characters of short documents that are read together.
_CHARACTERS = 1 << 20
# A .txt document of more than LONGEST characters is read as several of about PART characters.
LONGEST = 1 << 24
PART = 1 << 17
_LONGEST_LINE = 1 << 16
_BREAKS = [re.compile(pattern) for pattern in (r"\n[ \t\r]*+\n", r"\n", r"\s")]


class UndecodableByte(ValueError):
    """A file is not UTF-8 from the byte `args[0]` on."""


def documents_of_text(path: str) -> Iterator[str]:
    """The documents of a .txt file. Line ends are kept, a byte order mark is dropped. Raises UndecodableByte."""
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
    with open_text(path) as file:
        try:
            while line := file.readline(_LONGEST_LINE):
                # A marker may stand between line ends that only splitlines recognizes.
                yield from line.splitlines(keepends=True) if END_OF_TEXT in line else (line,)
        except UnicodeDecodeError as error:
            if not file.seekable():
                raise
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


def text_texts(path: str, *_) -> Iterator[pa.Array]:
    texts, characters = [], 0
    for text in documents_of_text(path):
        texts.append(text)
        characters += len(text)
        if characters >= _CHARACTERS:
            yield pa.array(texts, pa.string())
            texts, characters = [], 0
    yield pa.array(texts, pa.string())
