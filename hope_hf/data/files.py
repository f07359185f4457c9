"""Local files: found, checked and read as documents, a part at a time, so that a file of any size fits into memory.

In .json, .jsonl, .csv, .tsv, .parquet and .arrow a document is a row. In .txt it is the file, or the text between
lines that hold only `<|endoftext|>` if there are any; one of more than `LONGEST` characters is read as several of
about `PART`, cut at blank lines where there are any. A folder that `Dataset.save_to_disk` wrote is read, too.

Files are opened by their exact names: nothing in a name is a pattern or a URL. Only the text column of a table is
read, so the other columns may be of any type and may differ between files.

A row is bad if it cannot be parsed or its text is missing or no string. In what is read, a null stands for it.
"""

import glob
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
from datasets import Dataset, Features, IterableDataset, Value, concatenate_datasets
from datasets.exceptions import DatasetGenerationError

from hope_hf.cli.files import is_inside, read_object
from hope_hf.cli.flags import as_list
from hope_hf.cli.process import first_line, warn_once

from .cache import cached_texts
from .chats import COLUMNS, chat_text, choose_chat_column, column_option
from .compressed import CODECS, open_bytes, open_text, unpacked, unpacked_name
from .csv_files import csv_columns, csv_texts
from .json_files import BadRow, UnreadableText, check_json, json_columns, json_texts, json_values
from .vocabulary import END_OF_TEXT

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
# Number of table rows, and of characters of short documents, that are read together.
_ROWS = 100
_CHARACTERS = 1 << 20
# A .txt document of more than LONGEST characters is read as several of about PART characters.
LONGEST = 1 << 24
PART = 1 << 17
_LONGEST_LINE = 1 << 16
_BREAKS = [re.compile(pattern) for pattern in (r"\n[ \t\r]*+\n", r"\n", r"\s")]


class UndecodableByte(ValueError):
    """A file is not UTF-8 from the byte `args[0]` on."""


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

    skip: bad rows are nulls; otherwise the first one is an error. chats: the column holds lists of messages.
    """

    flag: str
    column: str | None
    skip: bool
    chats: bool


def find_files(names: str | list[str], flag: str, split: str = "train") -> list[str]:
    """The files that paths and glob patterns name, each once, the matches of a pattern sorted and all of one kind.

    A name that exists is no pattern, whatever characters it has; nor are existing folders at its beginning. A folder
    must come from `Dataset.save_to_disk`; `split` is read if it has splits. Empty files among others are left out,
    with a warning. Raises ValueError naming `flag` and file.
    """
    paths = list(dict.fromkeys(path for name in as_list(names) for path in _named(name, flag, split)))
    empty = [path for path in paths if _is_empty(path)]
    if len(empty) == len(paths):
        raise ValueError(f"{flag} {empty[0]} is empty: give a file with text.")
    if empty:
        first = f"{empty[0]} is" if len(empty) == 1 else f"{empty[0]} and {len(empty) - 1:,} more are"
        warn_once(f"{flag}: {first} empty and left out, {len(paths) - len(empty):,} of {len(paths):,} files are read.")
    return [path for path in paths if path not in set(empty)]


def _named(name: str, flag: str, split: str) -> list[str]:
    """The files of one path or pattern."""
    if os.path.isdir(name):
        if not is_saved(name):
            example = os.path.join(name, "*.txt")
            raise ValueError(f"{flag} {name} is a folder: name its files, for example {example}")
        paths = saved_files(name, f"{flag} {name}", split)
    elif os.path.exists(name):
        paths = [name]
    else:
        paths = sorted(filter(os.path.isfile, _matches(name)))
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
) -> Dataset | IterableDataset:
    """The documents of files, as the one column `text`. Raises ValueError naming the file.

    column: the column of the text (default: see `text_column`); .txt files have none.
    on_bad_rows: `error` raises for the first bad row, `skip` warns of their number; in a `Dataset` they are nulls.
    chats: the column (default: see `choose_chat_column`) holds chats, which become texts by `chat_text`.

    Only the beginning of a stream is read here: read the rest with `read_stream`.
    """
    tables = [path for path in paths if kind_of(path) != "text"]
    if column is not None and not tables:
        raise ValueError(f"{flag} {paths[0]} has no columns, and text_column names one: leave it out.")
    reading = Reading(flag, column, on_bad_rows == "skip", chats)
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
    found = cached_texts(paths, (reading.column, reading.skip, chats), texts)
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
    dataset: Dataset | IterableDataset, source: str, column: str | None = None
) -> Dataset | IterableDataset:
    """Only the column of chats of a data set, as the text column `text`: see `choose_chat_column`, `chat_text`."""
    names = dataset.column_names or list(next(iter(dataset), {}))
    column = choose_chat_column(names, source, column)
    # A stream stays without types: until datasets 5 the filter of a typed map fails.
    typed = {} if isinstance(dataset, IterableDataset) else {"features": Features({"text": Value("string")})}
    return dataset.map(lambda row: {"text": chat_text(row[column])}, remove_columns=names, **typed)


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


def _matches(pattern: str) -> Iterator[str]:
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


def _is_empty(path: str) -> bool:
    if unpacked_name(path) == path or os.path.getsize(path) == 0:
        return os.path.getsize(path) == 0
    try:
        with open_bytes(path) as file:
            return not file.read(1)
    except OSError:
        # It is not compressed as its name says: reading it reports that.
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
        count, read = 0, _chats if reading.chats else _READERS[kind_of(path)]
        for texts in read(path, reading.column, reading.skip):
            # pyarrow's readers do not check that strings are UTF-8.
            texts.validate(full=True)
            if texts.null_count and not reading.skip:
                first = texts.is_null().to_pylist().index(True)
                what = "chat with a turn of the assistant" if reading.chats else "text"
                raise BadRow(count + first + 1, f"has no {what} in the column {reading.column!r}")
            count += len(texts)
            yield texts


@contextmanager
def _in_sentences(path: str, flag: str) -> Iterator[None]:
    """Errors in the body become UnreadableText, which names the flag and the file."""
    name = f"{flag} {path}"
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
        raise UnreadableText(f"{name} cannot be read as {kind_of(path)}, write it again: {reason}") from error


def _text(path: str, *_) -> Iterator[pa.Array]:
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


def _parquet_column(path: str, column: str) -> Iterator[pa.Array]:
    with unpacked(path) as plain, pa.OSFile(plain) as file:
        for batch in _parquet(file).iter_batches(_ROWS, columns=[column]):
            yield batch.column(0)


def _arrow(file: pa.NativeFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and batches of Arrow's stream format, which `datasets` writes, or of its file format."""
    is_stream = file.read(6) != b"ARROW1"
    file.seek(0)
    reader = (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(file)
    batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
    return reader.schema, iter(batches)


def _arrow_column(path: str, column: str) -> Iterator[pa.Array]:
    with unpacked(path) as plain, pa.memory_map(plain) as file:
        for batch in _arrow(file)[1]:
            yield batch.column(column)


# By the kinds of files that may hold lists.
_OBJECTS = {"json": json_values, "parquet": _parquet_column, "arrow": _arrow_column}


def _as_texts(path: str, column: str, _) -> Iterator[pa.Array]:
    for values in _OBJECTS[kind_of(path)](path, column):
        yield values.cast(pa.string())


def _chats(path: str, column: str, _) -> Iterator[pa.Array]:
    for values in _OBJECTS[kind_of(path)](path, column):
        values = values.to_pylist() if isinstance(values, pa.Array) else values
        yield pa.array(list(map(chat_text, values)), pa.string())


_READERS = {"text": _text, "json": json_texts, "csv": csv_texts, "parquet": _as_texts, "arrow": _as_texts}


def _rows(paths: tuple[str, ...], reading: Reading) -> Iterator[dict[str, str]]:
    count = bad = 0
    for path in paths:
        for texts in _read_texts(path, reading):
            count, bad = count + len(texts), bad + texts.null_count
            yield from ({"text": text.as_py()} for text in texts if text.is_valid)
    _warn_of_bad_rows(reading.flag, bad, count)
