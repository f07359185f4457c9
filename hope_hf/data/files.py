"""Local files: found, checked and read as documents.

In .json, .jsonl, .parquet and .arrow a document is a row. In .txt it is the file, or the text between lines that hold
only `<|endoftext|>` if there are any. A folder that `Dataset.save_to_disk` wrote is read, too.
"""

import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, Value
from datasets.exceptions import DatasetGenerationError

from .cache import cached_texts
from .json_head import check_json
from .readers import ENDINGS, Columns, UnreadableText, columns_of, is_string, kind_of, read_texts
from .saved import is_saved, saved_files

_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".7z", ".tar", ".tgz")
# What datasets and pyarrow raise for the content of a file; RuntimeError: for example, too deep nesting.
_UNREADABLE = (DatasetGenerationError, OSError, ValueError, TypeError, RuntimeError)


def find_files(name: str, flag: str, split: str = "train") -> list[str]:
    """The files that a path or glob pattern names, sorted; none is empty, all are of one kind.

    A name that exists is that file, whatever characters it has, and so are the folders at its beginning. A folder is
    one of `Dataset.save_to_disk`; where it has splits, it means its `split`. Raises ValueError naming `flag` and file.
    """
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


def load_files(
    paths: list[str], flag: str, streaming: bool = False, column: str | None = None
) -> Dataset | IterableDataset:
    """The documents of files of one kind, as the one column `text`. Raises ValueError naming the file.

    column: the one that holds the text (default: see `text_column`); .txt files have none.

    Only the beginning of a stream is read here: read the rest with `read_stream`.
    """
    column = _column(paths, flag, column)
    if streaming:
        options = {"paths": paths, "flag": flag, "column": column}
        return IterableDataset.from_generator(_rows, Features({"text": Value("string")}), gen_kwargs=options)
    return cached_texts(paths, column, (texts for path in paths for texts in read_texts(path, flag, column)))


def read_stream(rows: Iterable[dict], source: str) -> Iterator[dict]:
    """`rows` of a stream; ValueError that names `source` (flag and files) if reading fails."""
    try:
        yield from rows
    except UnreadableText:
        raise
    except _UNREADABLE as error:
        raise ValueError(
            f"{source} cannot be read to its end, check the file or the connection: {_first_line(error)}"
        ) from error


def text_column(
    dataset: Dataset | IterableDataset, source: str, column: str | None = None
) -> Dataset | IterableDataset:
    """Only the text column of a data set, renamed `text`: see `choose_column`.

    A stream of unknown columns is read to its first row.
    """
    if dataset.features is None:
        row = next(iter(dataset), {})
        names, strings = list(row), [name for name, value in row.items() if isinstance(value, str)]
    else:
        names, schema = list(dataset.features), dataset.features.arrow_schema
        strings = [name for name in names if is_string(schema.field(name).type)]
    name = choose_column(Columns(names, strings, strings), source, column)
    dataset = dataset.select_columns([name])
    return dataset if name == "text" else dataset.rename_column(name, "text")


def choose_column(columns: Columns, source: str, column: str | None = None) -> str:
    """The text's column: `column`, or the one of the name `text`, or the only one of strings.

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
        raise ValueError(f"{source} has no column 'text' among {names}: rename the one that holds the text.")
    return columns.texts[0]


def _matches(pattern: str) -> Iterator[str]:
    # Of the folders that exist no character is meant as a pattern.
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return glob.iglob(glob.escape(folder) + pattern[len(folder) :], recursive=True)


def _check(path: str, flag: str) -> None:
    ending = Path(path).suffix.lower()
    if ending in _COMPRESSED:
        raise ValueError(f"{flag} {path} is compressed: unpack it, and name the files that were in it.")
    if kind_of(path) is None:
        raise ValueError(f"{flag} {path} is none of {ENDINGS}: convert or rename it.")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{flag} {path} cannot be read: check its permissions.")
    if os.path.getsize(path) == 0:
        raise ValueError(f"{flag} {path} is empty: give a file with text.")
    if kind_of(path) == "json":
        check_json(path, flag)


def _column(paths: list[str], flag: str, column: str | None) -> str | None:
    """The text's column in the first file, which all others must have."""
    if kind_of(paths[0]) == "text":
        return None
    chosen = choose_column(columns_of(paths[0], flag), f"{flag} {paths[0]}", column)
    for path in paths[1:]:
        choose_column(columns_of(path, flag), f"{flag} {path}", chosen)
    return chosen


def _rows(paths: list[str], flag: str, column: str | None) -> Iterator[dict[str, str | None]]:
    for path in paths:
        for texts in read_texts(path, flag, column):
            yield from ({"text": text.as_py()} for text in texts)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
