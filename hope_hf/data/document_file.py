"""One local file of documents: its kind, its plain content, and what is wrong with it.

`open_document_file` is the one place where a file is opened and unpacked; each kind has a reader of plain streams
(`text_files`, `json_files`, `csv_files`, `table_files`).
"""

import io
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from datasets.exceptions import DatasetGenerationError

from hope_hf.common.process import first_line

from .cache import writable_cache
from .file_kinds import CODECS, kind_of

# Their readers begin at the end of the file.
_READ_IN_ANY_ORDER = ("parquet", "arrow")
# Errors that datasets, pyarrow and json raise for a file's content; RuntimeError: for example, too deep nesting.
WRONG_CONTENT = (
    DatasetGenerationError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError
)  # fmt: skip
# Characters of short texts that are stored together.
_CHARACTERS = 1 << 20


class UnreadableText(ValueError):
    """A file cannot be read as text; the message is for the user."""


class BadRow(ValueError):
    """A row of a file is bad: `args` are its number, from 1, and what is wrong with it."""


@contextmanager
def errors_of_content(source: str, flag: str, kind: str | None) -> Iterator[None]:
    """Errors in the body become UnreadableText that begins with `source`, and names the option that `flag` has."""
    try:
        yield
    except UnreadableText:
        raise
    except BadRow as error:
        number, reason = error.args
        option = "--on_bad_rows skip" if flag.startswith("--") else "on_bad_rows: skip"
        raise UnreadableText(
            f"{source}, row {number:,}, {reason}: correct it, or leave out bad rows with {option}."
        ) from error
    except WRONG_CONTENT as error:
        reason = first_line(error)
        if isinstance(error, UnicodeDecodeError) or "UTF8" in reason:
            raise UnreadableText(f"{source} is not UTF-8 text: convert it.") from error
        if isinstance(error, OSError) and error.errno:
            raise UnreadableText(f"{source} cannot be read: {error.strerror}.") from error
        raise UnreadableText(f"{source} cannot be read as {kind}, write it again: {reason}") from error


@dataclass(frozen=True)
class Columns:
    """The columns of a table."""

    names: list[str]
    strings: list[str]
    """Columns of strings or, in JSON, of nulls only."""
    texts: list[str]
    """Columns of strings that are neither dates nor empty; a single one is the text, whatever its name."""


@contextmanager
def open_document_file(path: str) -> Iterator[tuple[str | None, BinaryIO]]:
    """The kind of a file and its plain content from the beginning on, unpacked if it is compressed.

    Raises OSError if it cannot be opened; reading what is not packed as the name says raises OSError or ValueError.
    """
    kind = kind_of(path)
    codec = CODECS.get(Path(path).suffix.lower())
    with ExitStack() as opened:
        stream = opened.enter_context(open(path, "rb"))
        if codec is not None:
            unpacking = opened.enter_context(pa.CompressedInputStream(pa.OSFile(path), codec))
            stream = opened.enter_context(io.BufferedReader(unpacking))
            if kind in _READ_IN_ANY_ORDER:
                copy = opened.enter_context(tempfile.TemporaryFile(dir=writable_cache()))
                shutil.copyfileobj(stream, copy)
                copy.seek(0)
                stream = copy
        yield kind, stream


def as_arrays(texts: Iterable[str | None]) -> Iterator[pa.Array]:
    """Texts as arrays of strings, each of about a million characters; half of a surrogate pair becomes `?`."""
    batch = []
    characters = 0
    for text in texts:
        if text is not None:
            text = text.encode("utf-8", errors="replace").decode()
            characters += len(text)
        batch.append(text)
        if characters >= _CHARACTERS:
            yield pa.array(batch, pa.string())
            batch = []
            characters = 0
    yield pa.array(batch, pa.string())
