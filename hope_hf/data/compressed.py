"""Compressed files: .gz, .bz2, .lz4 and .zst of every kind of file, unpacked while they are read."""

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

import pyarrow as pa

from .cache import writable_cache

# pyarrow has these codecs itself, so no other package is needed.
CODECS = {".gz": "gzip", ".bz2": "bz2", ".lz4": "lz4", ".zst": "zstd"}


def unpacked_name(path: str) -> str:
    """`path` without the ending of its compression."""
    stem, ending = os.path.splitext(path)
    return stem if ending.lower() in CODECS else path


def open_bytes(path: str) -> BinaryIO:
    """The unpacked content of a file, to read from its beginning to its end."""
    codec = CODECS.get(os.path.splitext(path)[1].lower())
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(path), codec)) if codec else open(path, "rb")


def open_text(path: str) -> io.TextIOWrapper:
    """The unpacked text of a file in UTF-8; line ends are kept, a byte order mark is dropped."""
    return io.TextIOWrapper(open_bytes(path), encoding="utf-8-sig", newline="")


@contextmanager
def unpacked(path: str) -> Iterator[str]:
    """A path at which the content can be read in any order: the file itself, or a temporary copy, unpacked."""
    if unpacked_name(path) == path:
        yield path
        return
    with tempfile.NamedTemporaryFile(dir=writable_cache()) as copy, open_bytes(path) as packed:
        shutil.copyfileobj(packed, copy)
        copy.flush()
        yield copy.name
