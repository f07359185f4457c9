"""Documents of local files and data sets, a part at a time, so that a file of any size fits into memory.

In .json, .jsonl, .csv, .tsv, .parquet and .arrow a document is a row. In .txt it is the file, or the text between
lines that hold only `<|endoftext|>` if there are any. A folder that `Dataset.save_to_disk` wrote is read, too.

Only the text column of a table is read, so the other columns may be of any type and may differ between files.

A row is bad if it cannot be parsed or its text is missing or no string. In what is read, a null stands for it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import pyarrow as pa
from datasets import Dataset, Features, IterableDataset, Value

from hope_hf.common.process import first_line, warn_once

from .cache import cached_texts
from .chat_template import ChatTemplate
from .chats import COLUMNS, TOOLS, BadChat, chat_text, choose_chat_column, column_option, of_table
from .csv_files import csv_columns, csv_texts
from .document_file import (
    WRONG_CONTENT,
    BadRow,
    Columns,
    UnreadableText,
    as_arrays,
    errors_of_content,
    open_document_file,
)
from .file_kinds import kind_of
from .json_files import json_columns, json_rows, json_texts
from .table_files import Table, is_string
from .text_files import documents_of_text

_TEXT = Features({"text": Value("string")})
_DELIMITERS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True)
class Reading:
    """How files are read: `flag` names them in errors, `column` is None for plain text.

    skip: bad rows are nulls; otherwise the first one is an error. chats: the column holds lists of messages, and the
    template, if it is known, must not fail on them.
    """

    flag: str
    column: str | None
    skip: bool
    chats: bool = False
    template: ChatTemplate | None = None

    @property
    def cache_key(self) -> tuple:
        """What decides the texts of given files."""
        return self.column, self.skip, self.template.source if self.template else self.chats


def load_files(
    paths: list[str],
    flag: str,
    streaming: bool = False,
    column: str | None = None,
    on_bad_rows: str = "error",
    chats: bool = False,
    template: ChatTemplate | None = None,
) -> Dataset | IterableDataset:
    """The documents of files, as the one column `text`. Raises ValueError naming the file.

    column: the column of the text (default: see `text_column`); .txt files have none.
    on_bad_rows: `error` raises for the first bad row, `skip` warns of their number; in a `Dataset` they are nulls.
    chats: the column (default: see `choose_chat_column`) holds chats, which become texts by `chat_text`; those on
    which `template` fails are bad rows.

    Only the beginning of a stream is read here: read the rest with `read_stream`.
    """
    tables = [path for path in paths if kind_of(path) != "text"]
    if column is not None and not tables:
        raise ValueError(f"{flag} {paths[0]} has no columns, and text_column names one: leave it out.")
    reading = Reading(flag, column, on_bad_rows == "skip", chats, template)
    if chats:
        reading = replace(reading, column=_column_of_chats(paths, reading))
    else:
        for path in tables:
            # All other files must have the first file's column.
            chosen = choose_column(_columns_of(path, reading), f"{flag} {path}", reading.column)
            reading = replace(reading, column=chosen)
    if streaming:
        # No list: of a list, each rank of several would read files of its own, whatever documents they hold.
        return IterableDataset.from_generator(_rows, _TEXT, gen_kwargs={"paths": tuple(paths), "reading": reading})
    documents = cached_texts(paths, reading.cache_key, _texts_of_files(paths, reading))
    _warn_of_bad_rows(flag, documents.data.column("text").null_count, len(documents))
    return documents


def _column_of_chats(paths: list[str], reading: Reading) -> str:
    for path in paths:
        if kind_of(path) in ("text", *_DELIMITERS):
            raise ValueError(
                f"{reading.flag} {path} has no lists of messages: give chats as .jsonl, .json or .parquet."
            )
    if reading.column is not None:
        return reading.column
    # All other files must have the first file's column.
    return choose_chat_column(_columns_of(paths[0], reading).names, f"{reading.flag} {paths[0]}")


def _warn_of_bad_rows(flag: str, bad: int, count: int) -> None:
    if bad:
        warn_once(f"{flag}: {bad:,} of {count:,} rows cannot be read or hold no text, and are skipped.")


def read_stream(rows: Iterable[dict], source: str) -> Iterator[dict]:
    """`rows` of a stream; ValueError that names `source` (flag and files) if reading fails."""
    try:
        yield from rows
    except UnreadableText:
        raise
    except WRONG_CONTENT as error:
        raise ValueError(
            f"{source} cannot be read to its end, check the file or the connection: {first_line(error)}"
        ) from error


def text_column(
    dataset: Dataset | IterableDataset, source: str, column: str | None = None
) -> Dataset | IterableDataset:
    """Only the text column of a data set, renamed `text`: see `choose_column`. Warns of rows without text.

    Of a stream of unknown columns, the first row is read.
    """
    if dataset.features is None:
        row = next(iter(dataset), {})
        names = list(row)
        strings = [name for name, value in row.items() if isinstance(value, str)]
    else:
        schema = dataset.features.arrow_schema
        names = list(dataset.features)
        strings = [name for name in names if is_string(schema.field(name).type)]
    name = choose_column(Columns(names, strings, strings), source, column)
    dataset = dataset.select_columns([name])
    if isinstance(dataset, Dataset):
        _warn_of_bad_rows(source, dataset.data.column(name).null_count, len(dataset))
    return dataset if name == "text" else dataset.rename_column(name, "text")


def chat_column(
    dataset: Dataset | IterableDataset,
    source: str,
    column: str | None = None,
    skip: bool = False,
    template: ChatTemplate | None = None,
) -> Dataset | IterableDataset:
    """Only the column of chats of a data set, as the text column `text`: see `choose_chat_column`, `chat_text`.

    A bad chat is a null with `skip`, else UnreadableText. Of a stream, it is raised when the row is read.
    """
    names = dataset.column_names or list(next(iter(dataset), {}))
    reading = Reading(source, choose_chat_column(names, source, column), skip, chats=True, template=template)

    def text_of(row: dict, index: int) -> dict:
        with errors_of_content(source, flag=source, kind="chats"):
            return {"text": _text_of_chat(of_table(row, reading.column), index + 1, reading)}

    if isinstance(dataset, IterableDataset):
        # Without types: until datasets 5 the filter of a typed map fails.
        return dataset.map(text_of, with_indices=True, remove_columns=names)
    texts = dataset.map(text_of, with_indices=True, remove_columns=names, features=_TEXT)
    _warn_of_bad_rows(source, texts.data.column("text").null_count, len(texts))
    return texts


def choose_column(columns: Columns, source: str, column: str | None = None) -> str:
    """The text's column: `column`, or the one named `text`, or the only column of strings.

    Raises ValueError naming `source` if there is no such column, or more than one.
    """
    chosen = _only_column(columns, source, column)
    if columns.names.count(chosen) > 1:
        raise ValueError(f"{source} has several columns {chosen!r}: give each a name of its own.")
    return chosen


def _only_column(columns: Columns, source: str, column: str | None) -> str:
    names = ", ".join(sorted(columns.names))
    if column is not None:
        if column not in columns.strings:
            raise ValueError(f"{source} has no column {column!r} of strings among {names}.")
        return column
    if "text" in columns.strings:
        return "text"
    if "text" in columns.names:
        raise ValueError(f"{source} has no column 'text' of strings: give every row a text in quotes.")
    if len(columns.texts) != 1:
        option = column_option(source)
        has_chats = not set(COLUMNS).isdisjoint(columns.names)
        chats = " or train on the chats with --assistant_only_loss" if has_chats else ""
        raise ValueError(f"{source} has no column 'text' among {names}: name one with {option}{chats}.")
    return columns.texts[0]


def _columns_of(path: str, reading: Reading) -> Columns:
    """The columns of a file of rows (not .txt). Raises UnreadableText."""
    with _errors_of(path, reading), open_document_file(path) as (kind, stream):
        if kind == "json":
            return json_columns(stream, reading.skip)
        if kind in _DELIMITERS:
            return csv_columns(stream, _DELIMITERS[kind])
        return Table(kind, stream).columns()


def _errors_of(path: str, reading: Reading):
    return errors_of_content(f"{reading.flag} {path}", reading.flag, kind_of(path))


def _texts_of_files(paths: Iterable[str], reading: Reading) -> Iterator[pa.Array]:
    for path in paths:
        yield from _texts_of_file(path, reading)


def _texts_of_file(path: str, reading: Reading) -> Iterator[pa.Array]:
    """The texts of a file in their order, as arrays of strings. Raises UnreadableText if reading fails."""
    with _errors_of(path, reading), open_document_file(path) as (kind, stream):
        count = 0
        for texts in _arrays(kind, stream, reading):
            # pyarrow's readers do not check that strings are UTF-8.
            texts.validate(full=True)
            if texts.null_count and not reading.skip:
                first = texts.is_null().to_pylist().index(True)
                raise BadRow(count + first + 1, f"has no text in the column {reading.column!r}")
            count += len(texts)
            yield texts


def _arrays(kind: str, stream: BinaryIO, reading: Reading) -> Iterator[pa.Array]:
    column = reading.column
    if reading.chats:
        return as_arrays(_texts_of_chats(kind, stream, reading))
    if kind == "text":
        return as_arrays(documents_of_text(stream))
    if kind == "json":
        return json_texts(stream, column, reading.skip)
    if kind in _DELIMITERS:
        return csv_texts(stream, _DELIMITERS[kind], column, reading.skip)
    return Table(kind, stream).texts(column)


def _texts_of_chats(kind: str, stream: BinaryIO, reading: Reading) -> Iterator[str | None]:
    """The chats of a file as texts, with None for bad rows where these are skipped."""
    rows = json_rows(stream, reading.skip) if kind == "json" else _rows_of_table(kind, stream, reading)
    for number, row in enumerate(rows, start=1):
        yield _text_of_chat(row or {}, number, reading)


def _rows_of_table(kind: str, stream: BinaryIO, reading: Reading) -> Iterator[dict]:
    table = Table(kind, stream)
    # the column may be that of tools
    wanted = dict.fromkeys((reading.column, TOOLS))
    columns = [name for name in wanted if name in table.schema.names]
    for row in table.rows(columns):
        yield of_table(row, reading.column)


def _text_of_chat(row: dict, number: int, reading: Reading) -> str | None:
    """The chat of a row as text; of a bad row, None if it is skipped, and otherwise BadRow."""
    try:
        return chat_text(row.get(reading.column), row.get(TOOLS), reading.template)
    except BadChat as error:
        if reading.skip:
            return None
        raise BadRow(number, f"{error} in the column {reading.column!r}") from error


def _rows(paths: tuple[str, ...], reading: Reading) -> Iterator[dict[str, str]]:
    count = 0
    bad = 0
    for texts in _texts_of_files(paths, reading):
        count += len(texts)
        bad += texts.null_count
        for text in texts:
            if text.is_valid:
                yield {"text": text.as_py()}
    _warn_of_bad_rows(reading.flag, bad, count)
