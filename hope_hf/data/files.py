"""Local files: found, checked and read as documents, a part at a time, so that a file of any size fits into memory.

In .json, .jsonl, .csv, .tsv, .parquet and .arrow a document is a row. In .txt it is the file, or the text between
lines that hold only `<|endoftext|>` if there are any. A folder that `Dataset.save_to_disk` wrote is read, too.

Files are opened by their exact names: nothing in a name is a pattern or a URL. Only the text column of a table is
read, so the other columns may be of any type and may differ between files.

A row is bad if it cannot be parsed or its text is missing or no string. In what is read, a null stands for it.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError

from hope_hf.common.files import is_inside, read_object
from hope_hf.common.flags import as_list
from hope_hf.common.process import first_line, warn_once

from .cache import cached_texts
from .chat_template import ChatTemplate
from .chats import COLUMNS, TOOLS, BadChat, chat_text, choose_chat_column, column_option, of_table
from .compressed import CODECS, open_bytes, unpacked, unpacked_name
from .csv_files import csv_columns, csv_has_no_rows, csv_texts
from .json_files import (
    BadRow,
    UnreadableText,
    check_json,
    json_columns,
    json_has_no_rows,
    json_rows,
    json_texts,
)  # fmt: skip
from .text_files import UndecodableByte, text_texts

_KINDS = {
    ".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "csv", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
# Archives may hold several files; pyarrow does not unpack .xz.
_ARCHIVES = (".xz", ".zip", ".7z", ".tar", ".tgz")
# The files of a folder that `save_to_disk` wrote.
_STATE, _SPLITS = "state.json", "dataset_dict.json"
# Errors that datasets, pyarrow and json raise for a file's content; RuntimeError: for example, too deep nesting.
_WRONG_CONTENT = (
    DatasetGenerationError, OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError
)  # fmt: skip
# Number of table rows that are read together.
_ROWS = 100


@dataclass(frozen=True)
class Columns:
    """The columns of a table."""

    names: list[str]
    strings: list[str]
    """Columns of strings or, in JSON, of nulls only."""
    texts: list[str]
    """Columns of strings that are neither dates nor empty; a single one is the text, whatever its name."""


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
    def what(self) -> tuple:
        """What decides the texts of given files, for the cache."""
        return self.column, self.skip, self.template.source if self.template else self.chats


def find_files(names: str | list[str], flag: str, split: str = "train") -> list[str]:
    """The files that paths and glob patterns name, each once, the matches of a pattern sorted and all of one kind.

    A name that exists is no pattern, whatever characters it has; nor are existing folders at its beginning. A folder
    must come from `Dataset.save_to_disk`; `split` is read if it has splits. Files without rows among others are left
    out, with a warning. Raises ValueError naming `flag` and file.
    """
    paths = list(dict.fromkeys(path for name in as_list(names) for path in _expand(name, flag, split)))
    empty = [path for path in paths if _has_no_rows(path)]
    if len(empty) == len(paths):
        what = "holds no rows with text" if os.path.getsize(empty[0]) else "is empty"
        raise ValueError(f"{flag} {empty[0]} {what}: give a file with text.")
    if empty:
        first = f"{empty[0]} is" if len(empty) == 1 else f"{empty[0]} and {len(empty) - 1:,} more are"
        warn_once(f"{flag}: {first} empty and left out, {len(paths) - len(empty):,} of {len(paths):,} files are read.")
    return [path for path in paths if path not in set(empty)]


def _expand(name: str, flag: str, split: str) -> list[str]:
    """The files of one path or pattern."""
    if os.path.isdir(name):
        if not is_saved(name):
            example = os.path.join(name, "*.txt")
            raise ValueError(f"{flag} {name} is a folder: name its files, for example {example}")
        paths = saved_files(name, f"{flag} {name}", split)
    elif os.path.exists(name):
        paths = [name]
    else:
        paths = sorted(filter(os.path.isfile, _glob(name)))
    if not paths:
        kind = "matches no file" if glob.has_magic(name) else "does not exist"
        raise ValueError(f"{flag} {name} {kind}: check the path.")
    for path in paths:
        _check(path, flag)
    if len({kind_of(path) for path in paths}) > 1:
        raise ValueError(f"{flag} {name} matches files of several kinds: name those of one kind, such as '*.txt'.")
    return paths


def size_of_files(names: str | list[str], flag: str) -> int:
    """Bytes of the files that `find_files` finds, as they lie on the disk."""
    return sum(map(os.path.getsize, find_files(names, flag)))


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
        if others := [path for path in paths if kind_of(path) not in _OBJECTS]:
            raise ValueError(f"{flag} {others[0]} has no lists of messages: give chats as .jsonl, .json or .parquet.")
        if column is None:
            # All other files must have the first file's column.
            names = _columns_of(paths[0], flag, reading.skip).names
            reading = replace(reading, column=choose_chat_column(names, f"{flag} {paths[0]}"))
    else:
        for path in tables:
            # All other files must have the first file's column.
            chosen = choose_column(_columns_of(path, flag, reading.skip), f"{flag} {path}", reading.column)
            reading = replace(reading, column=chosen)
    if streaming:
        # No list: of a list, each rank of several would read files of its own, whatever documents they hold.
        options = {"paths": tuple(paths), "reading": reading}
        return IterableDataset.from_generator(_rows, Features({"text": Value("string")}), gen_kwargs=options)
    texts = (texts for path in paths for texts in _read_texts(path, reading))
    found = cached_texts(paths, reading.what, texts)
    _warn_of_bad_rows(flag, found.data.column("text").null_count, len(found))
    return found


def _warn_of_bad_rows(flag: str, bad: int, count: int) -> None:
    if bad:
        warn_once(f"{flag}: {bad:,} of {count:,} rows cannot be read or hold no text, and are skipped.")


def read_stream(rows: Iterable[dict], source: str) -> Iterator[dict]:
    """`rows` of a stream; ValueError that names `source` (flag and files) if reading fails."""
    try:
        yield from rows
    except UnreadableText:
        raise
    except _WRONG_CONTENT as error:
        raise ValueError(
            f"{source} cannot be read to its end, check the file or the connection: {first_line(error)}"
        ) from error


def text_column(
    dataset: Dataset | IterableDataset, source: str, column: str | None = None
) -> Dataset | IterableDataset:
    """Only the text column of a data set, renamed `text`: see `choose_column`.

    Of a stream of unknown columns, the first row is read.
    """
    if dataset.features is None:
        row = next(iter(dataset), {})
        names, strings = list(row), [name for name, value in row.items() if isinstance(value, str)]
    else:
        names, schema = list(dataset.features), dataset.features.arrow_schema
        strings = [name for name in names if _is_string(schema.field(name).type)]
    name = choose_column(Columns(names, strings, strings), source, column)
    dataset = dataset.select_columns([name])
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
        with _in_sentences(None, source):
            return {"text": _text_of_chat(of_table(row, reading.column), index + 1, reading)}

    # A stream stays without types: until datasets 5 the filter of a typed map fails.
    typed = {} if isinstance(dataset, IterableDataset) else {"features": Features({"text": Value("string")})}
    found = dataset.map(text_of, with_indices=True, remove_columns=names, **typed)
    if not isinstance(found, IterableDataset):
        _warn_of_bad_rows(source, found.data.column("text").null_count, len(found))
    return found


def choose_column(columns: Columns, source: str, column: str | None = None) -> str:
    """The text's column: `column`, or the one named `text`, or the only column of strings.

    Raises ValueError naming `source` if there is no such column, or more than one.
    """
    names = ", ".join(sorted(columns.names))
    if column is not None and column not in columns.strings:
        raise ValueError(f"{source} has no column {column!r} of strings among {names}.")
    if column is not None:
        return column
    if "text" in columns.strings:
        return "text"
    if "text" in columns.names:
        raise ValueError(f"{source} has no column 'text' of strings: give every row a text in quotes.")
    if len(columns.texts) != 1:
        option = column_option(source)
        chats = " or train on the chats with --assistant_only_loss" if {*COLUMNS} & {*columns.names} else ""
        raise ValueError(f"{source} has no column 'text' among {names}: name one with {option}{chats}.")
    return columns.texts[0]


def kind_of(path: str) -> str | None:
    """The kind of a file by the end of its name, without that of its compression: text, json, csv, parquet, arrow."""
    return _KINDS.get(Path(unpacked_name(path)).suffix.lower())


def is_saved(folder: str) -> bool:
    """Whether `save_to_disk` wrote it, of one data set or of several splits."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in (_STATE, _SPLITS))


def load_saved(folder: str, source: str, split: str | None = None, streaming: bool = False):
    """A saved data set, mapped into memory: all splits as a dict, or one; without splits it counts as `train`.

    Raises ValueError that names `source`.
    """
    if split not in (None, "train") and not _splits(folder, source):
        raise ValueError(f"{source} has no splits, and split names {split}: leave it out.")
    if split is None:
        return {split: load_saved(folder, source, split, streaming) for split in _splits(folder, source) or ["train"]}
    files = saved_files(folder, source, split)
    try:
        dataset = concatenate_datasets([Dataset.from_file(file) for file in files])
    except (OSError, ValueError) as error:
        raise ValueError(f"{source} cannot be read, save the data set again: {error}") from error
    return dataset.to_iterable_dataset(num_shards=len(files)) if streaming else dataset


def saved_files(folder: str, source: str, split: str) -> list[str]:
    """The .arrow files of a data set, or of its `split` if it has splits. Raises ValueError that names `source`."""
    path, splits = Path(folder), _splits(folder, source)
    if splits and split not in splits:
        raise ValueError(f"{source} has no split {split!r}: name one of its folders, {', '.join(splits)}.")
    if splits:
        path = path / split
    state = read_object(path / _STATE, f"{source}:", "save the data set again")
    try:
        names = [entry["filename"] for entry in state["_data_files"]]
    except (KeyError, TypeError):
        names = [None]
    if not names or not all(is_inside(name) and (path / name).is_file() for name in names):
        raise ValueError(f"{source}: {path / _STATE} names files that are not there: save the data set again.")
    return [str(path / name) for name in names]


def _splits(folder: str, source: str) -> list[str]:
    file = Path(folder) / _SPLITS
    if not file.is_file():
        return []
    splits = read_object(file, f"{source}:", "save the data set again").get("splits")
    if not isinstance(splits, list) or not splits or not all(map(is_inside, splits)):
        raise ValueError(f"{source}: {file} names no splits: save the data set again.")
    return splits


def _glob(pattern: str) -> Iterator[str]:
    # Characters in the names of existing folders are not meant as a pattern.
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return glob.iglob(glob.escape(folder) + pattern[len(folder) :], recursive=True)


def _check(path: str, flag: str) -> None:
    ending = Path(unpacked_name(path)).suffix.lower()
    if ending in _ARCHIVES:
        raise ValueError(f"{flag} {path} is compressed: unpack it, and name the files that were in it.")
    if kind_of(path) is None:
        kinds, packed = ", ".join(_KINDS), ", ".join(CODECS)
        raise ValueError(f"{flag} {path} is none of {kinds}, nor one of these as {packed}: convert or rename it.")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{flag} {path} cannot be read: check its permissions.")


def _has_no_rows(path: str) -> bool:
    """Whether a file is empty, or a table without rows, as Spark and pandas write them."""
    if os.path.getsize(path) == 0:
        return True
    kind = kind_of(path)
    try:
        if kind == "json":
            return json_has_no_rows(path)
        if kind == "csv":
            return csv_has_no_rows(path)
        if kind == "text":
            with open_bytes(path) as file:
                return not file.read(1)
        with unpacked(path) as plain, pa.memory_map(plain) as file:
            if kind == "parquet":
                return _parquet(file).metadata.num_rows == 0
            return not any(batch.num_rows for batch in _arrow(file)[1])
    except _WRONG_CONTENT:
        # Reading it reports what is wrong.
        return False


def _columns_of(path: str, flag: str, skip: bool) -> Columns:
    """The columns of a file of rows (not .txt). Raises UnreadableText."""
    kind = kind_of(path)
    with _in_sentences(path, flag):
        if kind == "json":
            if not skip:
                check_json(path, flag)
            return Columns(*json_columns(path, skip))
        if kind == "csv":
            return Columns(*csv_columns(path))
        with unpacked(path) as plain, pa.memory_map(plain) as file:
            schema = _parquet(file).schema_arrow if kind == "parquet" else _arrow(file)[0]
        strings = [field.name for field in schema if _is_string(field.type)]
        return Columns(schema.names, strings, strings)


def _is_string(kind: pa.DataType) -> bool:
    """Whether a column of this type holds strings, in any encoding."""
    if pa.types.is_dictionary(kind):
        return _is_string(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _read_texts(path: str, reading: Reading) -> Iterator[pa.Array]:
    """The texts of a file in their order, as arrays of strings. Raises UnreadableText if reading fails."""
    with _in_sentences(path, reading.flag):
        if reading.chats:
            arrays = _chats(path, reading)
        else:
            arrays = _READERS[kind_of(path)](path, reading.column, reading.skip)
        count = 0
        for texts in arrays:
            # pyarrow's readers do not check that strings are UTF-8.
            texts.validate(full=True)
            if texts.null_count and not reading.skip:
                first = texts.is_null().to_pylist().index(True)
                raise BadRow(count + first + 1, f"has no text in the column {reading.column!r}")
            count += len(texts)
            yield texts


@contextmanager
def _in_sentences(path: str | None, flag: str) -> Iterator[None]:
    """Errors in the body become UnreadableText, which names the flag and the file; `flag` alone for a data set."""
    name = flag if path is None else f"{flag} {path}"
    try:
        yield
    except UnreadableText:
        raise
    except UndecodableByte as error:
        raise UnreadableText(f"{name} is not UTF-8 text (byte {error.args[0]}): convert it.") from error
    except BadRow as error:
        number, reason = error.args
        option = "--on_bad_rows skip" if flag.startswith("--") else "on_bad_rows: skip"
        raise UnreadableText(
            f"{name}, row {number:,}, {reason}: correct it, or leave out bad rows with {option}."
        ) from error
    except _WRONG_CONTENT as error:
        reason = first_line(error)
        if isinstance(error, UnicodeDecodeError) or "UTF8" in reason:
            raise UnreadableText(f"{name} is not UTF-8 text: convert it.") from error
        if isinstance(error, OSError) and error.errno:
            raise UnreadableText(f"{name} cannot be read: {error.strerror}.") from error
        kind = "chats" if path is None else kind_of(path)
        raise UnreadableText(f"{name} cannot be read as {kind}, write it again: {reason}") from error


def _parquet(file: pa.NativeFile) -> pyarrow.parquet.ParquetFile:
    # Read page by page, since a group of rows may be larger than the memory.
    return pyarrow.parquet.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20)


def _parquet_batches(path: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with unpacked(path) as plain, pa.OSFile(plain) as file:
        yield from _parquet(file).iter_batches(_ROWS, columns=columns)


def _arrow(file: pa.NativeFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and batches of Arrow's stream format, which `datasets` writes, or of its file format."""
    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    reader = (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(file)
    batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    return reader.schema, iter(batches)


def _arrow_batches(path: str, columns: list[str]) -> Iterator[pa.RecordBatch]:
    with unpacked(path) as plain, pa.memory_map(plain) as file:
        for batch in _arrow(file)[1]:
            yield batch.select(columns)


_BATCHES = {"parquet": _parquet_batches, "arrow": _arrow_batches}
# Kinds of files that may hold lists.
_OBJECTS = ("json", *_BATCHES)


def _as_texts(path: str, column: str, _) -> Iterator[pa.Array]:
    for batch in _BATCHES[kind_of(path)](path, [column]):
        yield batch.column(0).cast(pa.string())


def _chats(path: str, reading: Reading) -> Iterator[pa.Array]:
    """The chats of a file as arrays of texts, with nulls for bad rows where these are skipped."""
    number = 0
    for rows in _rows_of_chats(path, reading):
        texts = [_text_of_chat(row, number, reading) for number, row in enumerate(rows, number + 1)]
        number += len(rows)
        yield pa.array(texts, pa.string())


def _rows_of_chats(path: str, reading: Reading) -> Iterator[list[dict | None]]:
    """The rows of a file, some together; None for one that is no object."""
    kind = kind_of(path)
    if kind == "json":
        yield from json_rows(path)
        return
    there = _columns_of(path, reading.flag, reading.skip).names
    columns = [name for name in dict.fromkeys((reading.column, TOOLS)) if name in there]
    for batch in _BATCHES[kind](path, columns):
        yield [of_table(row, reading.column) for row in batch.to_pylist()]


def _text_of_chat(row: dict | None, number: int, reading: Reading) -> str | None:
    """The chat of a row as text; of a bad row, None if it is skipped, and otherwise BadRow."""
    row = row or {}
    try:
        return chat_text(row.get(reading.column), row.get(TOOLS), reading.template)
    except BadChat as error:
        if reading.skip:
            return None
        raise BadRow(number, f"{error} in the column {reading.column!r}") from error


_READERS = {"text": text_texts, "json": json_texts, "csv": csv_texts, "parquet": _as_texts, "arrow": _as_texts}


def _rows(paths: tuple[str, ...], reading: Reading) -> Iterator[dict[str, str]]:
    count = bad = 0
    for path in paths:
        for texts in _read_texts(path, reading):
            count, bad = count + len(texts), bad + texts.null_count
            yield from ({"text": text.as_py()} for text in texts if text.is_valid)
    _warn_of_bad_rows(reading.flag, bad, count)
