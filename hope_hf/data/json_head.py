"""Checks the beginning of a JSON file before pyarrow reads it: some content crashes the whole process there."""

import re

import numpy as np

# Bytes checked of each file: enough to find common mistakes, in negligible time.
_HEAD = 1 << 20
# Arrow's own limit for columns is one less; at about ten thousand levels its parser runs out of stack.
_DEEPEST = 64
# The closing quote may come after the head.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


def check_json(path: str, flag: str) -> None:
    """Raises ValueError where the file does not begin with rows, holds no string, or is nested too deep.

    This includes a file of only `null`, on which pyarrow's reader crashes with a segmentation fault.
    """
    with open(path, "rb") as file:
        head = file.read(_HEAD).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith((b"{", b"[")) or b'"' not in head:
        raise ValueError(
            f'{flag} {path} holds no rows with text: write one object such as {{"text": "..."}} a line, or a list of '
            "them."
        )
    if _depth(_STRING.sub(b"", head)) > _DEEPEST:
        raise ValueError(
            f"{flag} {path} nests lists and objects more than {_DEEPEST} deep: leave out the column that does."
        )


def _depth(brackets: bytes) -> int:
    characters = np.frombuffer(brackets, np.uint8)
    opened, closed = (np.isin(characters, list(kind)) for kind in (b"{[", b"}]"))
    return int((opened.astype(np.int32) - closed).cumsum().max(initial=0))
