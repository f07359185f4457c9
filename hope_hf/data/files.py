"""Local files: found, checked and read as documents.

In .json, .jsonl and .parquet a document is a row. In .txt it is the file, or the text between lines that hold only
`<|endoftext|>` if there are any.
"""

import errno
import glob
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset, IterableDataset, config, load_dataset
from datasets.exceptions import DatasetGenerationError

from .json_head import check_json
from .vocabulary import END_OF_TEXT

_BUILDERS = {".txt": "text", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# What datasets and pyarrow raise for the content of a file; RuntimeError: for example, too deep nesting.
_UNREADABLE = (DatasetGenerationError, OSError, ValueError, TypeError, RuntimeError)


class UnreadableText(ValueError):
    """A text file cannot be read; the message is for the user."""


def find_files(pattern: str, flag: str) -> list[str]:
    """The files that a path or glob pattern names, sorted; none is empty, all are of one kind.

    Raises ValueError naming `flag` and the file.
    """
    if os.path.isdir(pattern):
        raise ValueError(f"{flag} {pattern} is a folder: name its files, for example {os.path.join(pattern, '*.txt')}")
    found = sorted(filter(os.path.isfile, glob.iglob(pattern, recursive=True)))
    paths = [pattern] if os.path.exists(pattern) else found
    if not paths:
        kind = "matches no file" if glob.has_magic(pattern) else "does not exist"
        raise ValueError(f"{flag} {pattern} {kind}: check the path.")
    for path in paths:
        if Path(path).suffix.lower() not in _BUILDERS:
            raise ValueError(f"{flag} {path} is none of .txt, .json, .jsonl, .parquet: convert or rename it.")
        if not os.access(path, os.R_OK):
            raise ValueError(f"{flag} {path} cannot be read: check its permissions.")
        if os.path.getsize(path) == 0:
            raise ValueError(f"{flag} {path} is empty: give a file with text.")
        if _builder([path]) == "json":
            check_json(path, flag)
    if len({_builder([path]) for path in paths}) > 1:
        raise ValueError(f"{flag} {pattern} matches files of several kinds: name those of one kind, such as '*.txt'.")
    return paths


def load_files(
    paths: list[str], flag: str, streaming: bool = False, column: str | None = None
) -> Dataset | IterableDataset:
    """The documents of files of one kind, as the one column `text`. Raises ValueError naming the file.

    column: the one that holds the text (default: see `text_column`); .txt files have none.

    Only the beginning of a stream is read here: read the rest with `read_stream`.
    """
    if _builder(paths) == "text":
        if streaming:
            return IterableDataset.from_generator(_rows, gen_kwargs={"paths": paths, "flag": flag})
        # In memory: the disk cache of plain text is looked up by path, and would miss that the file has changed.
        return Dataset.from_dict({"text": list(_texts(paths, flag))})
    try:
        dataset = load_dataset(_builder(paths), data_files=paths, split="train", streaming=streaming)
        columns = column_kinds(dataset)
    except _UNREADABLE as error:
        cause = error.__cause__ or error
        if getattr(cause, "errno", None) == errno.ENOSPC:
            raise ValueError(
                f"There is no space left for {flag} {_names(paths)} in {config.HF_DATASETS_CACHE}: free some, or name "
                "another folder in HF_DATASETS_CACHE."
            ) from error
        kind = _builder(paths)
        raise ValueError(
            f"{flag} {_names(paths)} cannot be read as {kind}, write it again: {_first_line(cause)}"
        ) from error
    return text_column(dataset, columns, f"{flag} {_names(paths)}", column)


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


def column_kinds(dataset: Dataset | IterableDataset) -> dict[str, bool]:
    """Every column's name, and whether it holds strings; a stream of unknown columns is read to its first row."""
    if dataset.features is None:
        return {name: isinstance(value, str) for name, value in next(iter(dataset), {}).items()}
    kinds = ("string", "large_string")
    return {name: getattr(feature, "dtype", None) in kinds for name, feature in dataset.features.items()}


def text_column(
    dataset: Dataset | IterableDataset, columns: dict[str, bool], source: str, column: str | None = None
) -> Dataset | IterableDataset:
    """Only the text column, renamed `text`: `column`, or the column of this name, or the only one of strings.

    `columns`: from `column_kinds`. Raises ValueError naming `source` if there is no such column, or more than one.
    """
    strings = [name for name, is_string in columns.items() if is_string]
    if column is not None and column not in strings:
        raise ValueError(f"{source} has no column {column!r} of strings among {', '.join(sorted(columns))}.")
    if column is not None:
        strings = [column]
    if column is None and "text" in columns and "text" not in strings:
        raise ValueError(f"{source} has no column 'text' of strings: give every row a text in quotes.")
    if "text" not in strings and len(strings) != 1:
        raise ValueError(
            f"{source} has no column 'text' among {', '.join(sorted(columns))}: rename the one that holds the text."
        )
    name = "text" if "text" in strings else strings[0]
    dataset = dataset.select_columns([name])
    return dataset if name == "text" else dataset.rename_column(name, "text")


def _builder(paths: list[str]) -> str:
    return _BUILDERS[Path(paths[0]).suffix.lower()]


def _names(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _rows(paths: list[str], flag: str) -> Iterator[dict[str, str]]:
    for text in _texts(paths, flag):
        yield {"text": text}


def _texts(paths: list[str], flag: str) -> Iterator[str]:
    for path in paths:
        try:
            # Not read_text, which would change line ends; a byte order mark is not text.
            text = Path(path).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UnreadableText(f"{flag} {path} is not UTF-8 text (byte {error.start}): convert it.") from error
        except OSError as error:
            raise UnreadableText(f"{flag} {path} cannot be read: {error.strerror}.") from error
        yield from _documents(text)


def _documents(text: str) -> Iterator[str]:
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.strip() == END_OF_TEXT:
            yield "".join(lines)
            lines = []
        else:
            lines.append(line)
    yield "".join(lines)
