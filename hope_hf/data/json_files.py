"""The rows of a JSON file: objects one after another, a list of objects or strings, or columns as pandas writes them.

Objects one after another are read a few megabytes at a time, the other forms as a whole. Where bad rows are skipped,
every line is a row, unless the first object takes several.
"""

import io
import json
import re
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np
import pyarrow as pa
import pyarrow.json

from .compressed import open_bytes, open_text

# Bytes checked of each file before pyarrow reads it: enough to find common mistakes, in negligible time.
_CHECKED = 1 << 20
# Arrow's own limit for columns is one less; at about ten thousand levels its parser runs out of stack.
_DEEPEST = 64
# The closing quote may come after the bytes that are checked.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
# Bytes read together; up to `_MOST_BYTES` if an object does not end with its line.
_BYTES = 8 << 20
_MOST_BYTES = 256 << 20
# Rows from which the columns are determined.
_ROWS = 1_000
_SPACE = re.compile(r"\s*")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T][\d:.,]+ ?(Z|[+-][\d:]+)?)?")


class UnreadableText(ValueError):
    """A file cannot be read as text; the message is for the user."""


class BadRow(ValueError):
    """A row of a file is bad: `args` are its number, from 1, and what is wrong with it."""


def check_json(path: str, flag: str) -> None:
    """Raise UnreadableText if the file does not begin with rows, holds no string, or is nested too deep.

    Such content, for example a file of `null` alone, ends the process in pyarrow's reader with a segmentation fault.
    """
    with open_bytes(path) as file:
        head = file.read(_CHECKED).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not head.startswith((b"{", b"[")) or b'"' not in head:
        raise UnreadableText(
            f'{flag} {path} holds no rows with text: write one object such as {{"text": "..."}} a line, or a list of '
            "them."
        )
    brackets = np.frombuffer(_STRING.sub(b"", head), np.uint8)
    opened, closed = (np.isin(brackets, list(kind)) for kind in (b"{[", b"}]"))
    if int((opened.astype(np.int32) - closed).cumsum().max(initial=0)) > _DEEPEST:
        raise UnreadableText(
            f"{flag} {path} nests lists and objects more than {_DEEPEST} deep: leave out the column that does."
        )


def json_has_no_rows(path: str) -> bool:
    """Whether a file holds white space, an empty list, or columns without rows."""
    with open_text(path) as file:
        head = file.read(_ROWS)
        while head and head.isspace():
            head = file.read(_ROWS)
        # No longer file is without rows, save for an indentation.
        head = head.strip() + file.read(_ROWS).strip()
    if head.startswith("["):
        return head.removeprefix("[").lstrip().startswith("]")
    if not head.startswith("{") or len(head) >= _ROWS:
        return not head
    values = json.loads(head).values()
    return bool(values) and not any(values) and all(isinstance(value, dict | list) for value in values)


def json_columns(path: str, skip: bool) -> tuple[list[str], list[str], list[str]]:
    """Names of the columns of the first rows: all; those of strings or nothing; those of strings that are no dates.

    skip: bad rows do not count, and a column with some strings is one of strings.
    """
    values: dict[str, list] = {}
    for row in islice(filter(None, _rows_or_none(path)), _ROWS) if skip else _first_rows(path)[0][:_ROWS]:
        for name, value in row.items():
            found = values.setdefault(name, [])
            if not skip or isinstance(value, str):
                found.append(value)
    strings = [name for name, found in values.items() if found and all(isinstance(v, str | None) for v in found)]
    return list(values), strings, [name for name in strings if any(v and not _DATE.fullmatch(v) for v in values[name])]


def json_texts(path: str, column: str, skip: bool) -> Iterator[pa.Array]:
    """The strings of a column, as arrays; with `skip`, nulls stand for bad rows."""
    if skip:
        for rows in json_rows(path):
            texts = [row.get(column) if row else None for row in rows]
            yield _strings([{column: text if isinstance(text, str) else None} for text in texts], column)
        return
    rows, is_whole = _first_rows(path)
    if is_whole:
        yield _strings(rows, column)
        return
    del rows
    schema = pa.schema([(column, pa.string())])
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    with open_bytes(path) as file:
        while lines := file.read(_BYTES):
            lines = (lines + file.readline()).removeprefix(b"\xef\xbb\xbf")
            while True:
                # One block, since pyarrow may cut blocks within rows.
                block = pyarrow.json.ReadOptions(block_size=len(lines) + 1)
                try:
                    texts = pyarrow.json.read_json(io.BytesIO(lines), block, options)[column].chunks
                    break
                except pa.ArrowInvalid as error:
                    # pyarrow refuses half of a surrogate pair, which json.dumps writes for scraped text.
                    rows, are_all = _decoded(lines, len(lines)) if "surrogate" in str(error) else ([], False)
                    if are_all:
                        texts = [_strings(rows, column)]
                        break
                    # The last object may continue after its line.
                    more = file.read(len(lines)) if len(lines) < _MOST_BYTES else b""
                    if not more:
                        _name_bad_row(path, column)
                        raise
                    lines += more + file.readline()
            yield from texts


def _name_bad_row(path: str, column: str) -> None:
    """Raise BadRow for the first bad row of a file, if its rows are its lines."""
    for number, row in enumerate(_rows_or_none(path), 1):
        if row is None or not isinstance(row.get(column), str):
            if number > 1:
                raise BadRow(number, "is not JSON" if row is None else f"has no text in the column {column!r}")
            return


def json_rows(path: str) -> Iterator[list[dict | None]]:
    """The rows of a file, some together; None for bad rows."""
    rows = _rows_or_none(path)
    while batch := list(islice(rows, _ROWS)):
        yield batch


def _rows_or_none(path: str) -> Iterator[dict | None]:
    """The rows of a file; None for one that is not an object."""
    try:
        rows, is_whole = _first_rows(path, lambda row: row if isinstance(row, dict) else None)
    except (ValueError, TypeError, RecursionError):
        rows, is_whole = [], False
    if is_whole:
        yield from rows
        return
    if rows and _takes_lines(path):
        with open_text(path) as file:
            for row, _ in _objects(file.read()):
                yield row
        return
    yield from _rows_of_lines(path)


def _takes_lines(path: str) -> bool:
    """Whether the first object of a file takes several lines."""
    if next(_rows_of_lines(path)) is not None:
        return False
    with open_text(path) as file:
        text = file.read()
    begin = _SPACE.match(text).end()
    _, end = json.JSONDecoder().raw_decode(text, begin)
    return "\n" in text[begin:end]


def _rows_of_lines(path: str) -> Iterator[dict | None]:
    """The object of every line; None for one that is none."""
    with open_bytes(path) as file:
        for number, line in enumerate(file):
            if line.isspace():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig" if number == 0 else "utf-8"))
            except (ValueError, RecursionError):
                row = None
            yield row if isinstance(row, dict) else None


def _object(row: object) -> dict:
    if not isinstance(row, dict):
        raise TypeError(f"a row is {json.dumps(row)[:40]} instead of an object")
    return row


def _first_rows(path: str, row_of: Callable = _object) -> tuple[list, bool]:
    """All rows of a file that is one list or one object of columns, and True; else the first rows, and False.

    row_of: makes a row of a list's element.
    """
    with open_text(path) as file:
        is_list = _SPACE.sub("", file.read(_ROWS))[:1] == "["
    if is_list:
        with open_text(path) as file:
            return [row_of({"text": row} if isinstance(row, str) else row) for row in json.load(file)], True
    with open_bytes(path) as file:
        head = file.read(_BYTES) + file.readline()
        try:
            rows, are_all = _decoded(head)
        except ValueError:
            # The first object may be longer.
            rows, are_all = _decoded(head + file.read(_MOST_BYTES))
        are_all = are_all and not file.read(1)
    if not are_all or len(rows) != 1 or not rows[0]:
        return rows, False
    # pandas writes {"text": {"0": "first", "1": "second"}} or {"text": ["first", "second"]}.
    columns = [list(values.values()) if isinstance(values, dict) else values for values in rows[0].values()]
    if not all(isinstance(values, list) and values for values in columns) or len(set(map(len, columns))) > 1:
        return rows, False
    if all(isinstance(values[0], dict) for values in columns):
        # the messages of a single chat
        return rows, False
    return [dict(zip(rows[0], row, strict=True)) for row in zip(*columns, strict=True)], True


def _decoded(head: bytes, most: int = _ROWS) -> tuple[list[dict], bool]:
    """The objects at the beginning of some bytes, at most `most`, and whether nothing follows them."""
    objects = _objects(head.decode("utf-8-sig", errors="replace"))
    rows, are_all = [], True
    try:
        for row, is_last in islice(objects, most):
            rows.append(row)
            are_all = is_last
    except ValueError:
        if not rows:
            raise
        # The object is cut off or invalid; reading the file will show which.
        return rows, False
    return rows, are_all


def _objects(text: str) -> Iterator[tuple[dict, bool]]:
    """The objects of a text, one after another, and whether it is the last one.

    Raises ValueError for what is no JSON, TypeError for another value.
    """
    decoder, place = json.JSONDecoder(), _SPACE.match(text).end()
    while place < len(text):
        row, end = decoder.raw_decode(text, place)
        place = _SPACE.match(text, end).end()
        yield _object(row), place == len(text)


def _strings(rows: list[dict], column: str) -> pa.Array:
    texts = [row.get(column) for row in rows]
    for text in texts:
        if not isinstance(text, str | None):
            raise TypeError(f"a text is {json.dumps(text)[:40]} instead of a string")
    # Half of a surrogate pair is not a character.
    return pa.array([text and text.encode("utf-8", errors="replace").decode() for text in texts], pa.string())
