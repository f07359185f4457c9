"""The rows of a JSON file: objects one after another, a list of objects or strings, or what pandas makes of columns.

Objects are read a line at a time, those that take several lines one at a time; lists and columns are read as a whole.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import BinaryIO

import pyarrow as pa

from .document_file import BadRow, Columns, as_arrays

# Rows from which the columns are determined.
_ROWS = 1_000
_SPACE = re.compile(r"\s*")
_DATE = re.compile(r"\d{4}-\d\d-\d\d([ T][\d:.,]+ ?(Z|[+-][\d:]+)?)?")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_END = object()


def json_rows(stream: BinaryIO, skip: bool) -> Iterator[dict | None]:
    """The rows of a file.

    skip: None stands for a row that is no object; otherwise the first one raises BadRow. A list that is no JSON
    raises ValueError in any case.
    """
    for number, value in enumerate(_values(_lines(stream), skip), start=1):
        if isinstance(value, dict):
            yield value
        elif skip:
            yield None
        else:
            raise BadRow(number, 'is no object such as {"text": "..."}')


def json_has_no_rows(stream: BinaryIO) -> bool:
    """Whether a file holds white space, an empty list, or columns without rows."""
    lines = _lines(stream)
    first = next(lines, b"").strip()
    if first.startswith(b"["):
        after_bracket = first[1:].strip() or next(lines, b"").strip()
        return after_bracket.startswith(b"]")
    return next(_values(chain([first], lines), skip=True), _END) is _END


def json_columns(stream: BinaryIO, skip: bool) -> Columns:
    """The columns of the first rows. skip: bad rows do not count, and a column with some strings is one of strings."""
    values_by_name: dict[str, list] = {}
    for row in islice(json_rows(stream, skip), _ROWS):
        for name, value in (row or {}).items():
            values = values_by_name.setdefault(name, [])
            if not skip or isinstance(value, str):
                values.append(value)
    strings = []
    texts = []
    for name, values in values_by_name.items():
        if values and all(isinstance(value, str | None) for value in values):
            strings.append(name)
            if any(value and not _DATE.fullmatch(value) for value in values):
                texts.append(name)
    return Columns(list(values_by_name), strings, texts)


def json_texts(stream: BinaryIO, column: str, skip: bool) -> Iterator[pa.Array]:
    """The strings of a column, as arrays; null where there is none."""
    return as_arrays(_text(row, column) for row in json_rows(stream, skip))


def _text(row: dict | None, column: str) -> str | None:
    value = None if row is None else row.get(column)
    return value if isinstance(value, str) else None


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    """The lines that are not blank, without a byte order mark."""
    for number, line in enumerate(stream):
        if number == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        if line and not line.isspace():
            yield line


def _values(lines: Iterator[bytes], skip: bool) -> Iterator[object]:
    """What should be the rows of a file; None for a broken line with `skip`."""
    first_line = next(lines, b"")
    if first_line.lstrip().startswith(b"["):
        for value in json.loads(first_line + b"".join(lines)):
            yield {"text": value} if isinstance(value, str) else value
        return
    head, takes_several_lines = _first_object(chain([first_line], lines))
    lines = chain(head, lines)
    values = _values_of_several_lines(lines) if takes_several_lines else _values_of_lines(lines, skip)
    first = next(values, _END)
    second = next(values, _END)
    table = None
    if second is _END and isinstance(first, dict):
        table = _rows_of_split(first)
        if table is None:
            table = _rows_of_columns(first)
    if table is not None:
        yield from table
        return
    for value in chain([first, second], values):
        if value is not _END:
            yield value


def _first_object(lines: Iterator[bytes]) -> tuple[list[bytes], bool]:
    """The lines up to the end of the first object, and whether it is one that takes several."""
    head = []
    for line in lines:
        head.append(line)
        if len(head) > 1 and not _may_end(line):
            continue
        text = b"".join(head).decode("utf-8", errors="replace").rstrip()
        try:
            _decoded(text)
        except json.JSONDecodeError as error:
            if error.pos < len(text):
                return head, False
        except RecursionError:
            return head, False
        else:
            return head, len(head) > 1
    return head, False


def _may_end(line: bytes) -> bool:
    """Whether an object may end with a line."""
    return line.rstrip().endswith(b"}")


def _values_of_lines(lines: Iterator[bytes], skip: bool) -> Iterator[object]:
    """Each line holds whole values."""
    number = 0
    for line in lines:
        try:
            values = _decoded(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if skip:
                values = [None]
            elif isinstance(error, UnicodeDecodeError):
                raise
            else:
                raise BadRow(number + 1, "is not JSON") from error
        number += len(values)
        yield from values


def _values_of_several_lines(lines: Iterator[bytes]) -> Iterator[object]:
    """An object ends where a line ends with a bracket and the text so far is JSON."""
    text = ""
    for line in lines:
        text += line.decode("utf-8")
        if not _may_end(line):
            continue
        try:
            values = _decoded(text)
        except json.JSONDecodeError as error:
            if error.pos < len(text.rstrip()):
                raise
            continue
        yield from values
        text = ""
    yield from _decoded(text)


def _decoded(text: str) -> list:
    """The JSON values of a text, one after another; raises ValueError for what is no JSON."""
    decoder = json.JSONDecoder()
    values = []
    end = _SPACE.match(text).end()
    while end < len(text):
        value, end = decoder.raw_decode(text, end)
        values.append(value)
        end = _SPACE.match(text, end).end()
    return values


def _rows_of_split(value: dict) -> list[dict] | None:
    """The rows of {"columns": ["text"], "data": [["first"], ["second"]]}, pandas' form `split`; None for others."""
    if not {"columns", "data"} <= value.keys() <= {"columns", "index", "data"}:
        return None
    names, rows = value["columns"], value["data"]
    if not isinstance(names, list) or not isinstance(rows, list):
        return None
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        return None
    return [dict(zip(names, row, strict=True)) for row in rows]


def _rows_of_columns(value: dict) -> list[dict] | None:
    """The rows of {"text": {"0": "first", "1": "second"}} or {"text": ["first", "second"]}; None for a row itself."""
    if not value:
        return None
    columns = []
    for values in value.values():
        if not isinstance(values, dict | list):
            return None
        columns.append(list(values.values()) if isinstance(values, dict) else values)
    if not any(columns):
        return []
    is_table = len(set(map(len, columns))) == 1
    if not is_table or all(isinstance(values[0], dict) for values in columns):
        # The messages of a single chat are a list of objects, too.
        return None
    rows = zip(*columns, strict=True)
    return [dict(zip(value, row, strict=True)) for row in rows]
