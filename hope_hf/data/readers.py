"""The texts of one local file, in pieces that fit into memory whatever the file's size.

Files are opened by their exact names: nothing in a name is a pattern or a URL. Of a table only the column of the text
is read, so the other columns may be of any type and may differ between files.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from .json_rows import json_columns, json_texts
from .text_documents import UndecodableByte, documents_of_text

_KINDS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
ENDINGS = ", ".join(_KINDS)
# What pyarrow and json raise for the content of a file; RuntimeError: for example, too deep nesting.
_UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError)
_ROWS = 100
# Characters of short documents that are read together.
_CHARACTERS = 1 << 20


class UnreadableText(ValueError):
    """A file cannot be read as text; the message is for the user."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table."""

    names: list[str]
    strings: list[str]
    """Those of strings or, in JSON, of nothing."""
    texts: list[str]
    """Those that are the text where no other is, whatever its name: neither dates nor empty."""


def kind_of(path: str) -> str | None:
    """The kind of a file by the end of its name: text, json, parquet or arrow."""
    return _KINDS.get(Path(path).suffix.lower())


def columns_of(path: str, flag: str) -> Columns | None:
    """The columns of a file; None for plain text, which has none. Raises UnreadableText."""
    kind = kind_of(path)
    if kind == "text":
        return None
    with _InSentences(path, flag):
        if kind == "json":
            return Columns(*json_columns(path))
        with pa.memory_map(path) as file:
            schema = _parquet(file).schema_arrow if kind == "parquet" else pa.ipc.open_stream(file).schema
        strings = [field.name for field in schema if is_string(field.type)]
        return Columns(schema.names, strings, strings)


def read_texts(path: str, flag: str, column: str | None) -> Iterator[pa.Array]:
    """The texts of a file in their order, as arrays of strings. Raises UnreadableText where reading fails.

    column: the one that holds the text; None for plain text.
    """
    with _InSentences(path, flag):
        for texts in _READERS[kind_of(path)](path, column):
            # pyarrow's readers do not check that strings are UTF-8.
            texts.validate(full=True)
            yield texts


def is_string(kind: pa.DataType) -> bool:
    """Whether a column of this type holds strings, in whichever way."""
    if pa.types.is_dictionary(kind):
        return is_string(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


class _InSentences:
    """Errors in the body become UnreadableText, which names the flag and the file."""

    def __init__(self, path: str, flag: str):
        self.path, self.flag = path, flag

    def __enter__(self):
        return self

    def __exit__(self, _, error, trace):
        if isinstance(error, UnreadableText) or not isinstance(error, _UNREADABLE):
            return
        name, reason = f"{self.flag} {self.path}", (str(error).strip() or type(error).__name__).splitlines()[0]
        if isinstance(error, UndecodableByte):
            raise UnreadableText(f"{name} is not UTF-8 text (byte {error.place}): convert it.") from error
        if isinstance(error, UnicodeDecodeError) or "UTF8" in reason:
            raise UnreadableText(f"{name} is not UTF-8 text: convert it.") from error
        if isinstance(error, OSError) and error.errno:
            raise UnreadableText(f"{name} cannot be read: {error.strerror}.") from error
        raise UnreadableText(f"{name} cannot be read as {kind_of(self.path)}, write it again: {reason}") from error


def _text(path: str, _: None) -> Iterator[pa.Array]:
    texts, characters = [], 0
    for text in documents_of_text(path):
        texts.append(text)
        characters += len(text)
        if characters >= _CHARACTERS:
            yield pa.array(texts, pa.string())
            texts, characters = [], 0
    yield pa.array(texts, pa.string())


def _parquet(file: pa.NativeFile) -> pyarrow.parquet.ParquetFile:
    # Read page by page, since a group of rows may be larger than the memory.
    return pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)


def _parquet_texts(path: str, column: str) -> Iterator[pa.Array]:
    with pa.OSFile(path) as file:
        for batch in _parquet(file).iter_batches(_ROWS, columns=[column]):
            yield batch.column(0).cast(pa.string())


def _arrow_texts(path: str, column: str) -> Iterator[pa.Array]:
    with pa.memory_map(path) as file:
        for batch in pa.ipc.open_stream(file):
            yield batch.column(column).cast(pa.string())


_READERS = {"text": _text, "json": json_texts, "parquet": _parquet_texts, "arrow": _arrow_texts}
