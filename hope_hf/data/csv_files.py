"""The rows of .csv and .tsv files whose first line names the columns; fields in quotes may hold line ends."""

import re
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
from pyarrow import csv

from .document_file import BadRow, Columns

# Bytes read together; a row must fit into them.
_BYTES = 1 << 25
# By the sign between columns, signs in the name of an only column that say that another one stands there.
_NO_COLUMNS = {",": "[;\t|]", "\t": "[,;|]"}


def csv_has_no_rows(stream: BinaryIO) -> bool:
    """Whether a file holds at most the names of its columns."""
    stream.readline()
    return not any(map(bytes.strip, stream))


def csv_columns(stream: BinaryIO, delimiter: str) -> Columns:
    """All columns, each of which may be read as strings; texts hold more than numbers and dates in the first rows."""
    schema = _reader(stream, delimiter, csv.ConvertOptions(), lambda row: "skip").schema
    only = schema.names[0] if len(schema) == 1 else ""
    # a comma in a .csv file's only name is one in quotes
    if re.search(_NO_COLUMNS[delimiter], only):
        raise ValueError(f"its only column is {only!r}, so separate columns by commas in .csv and by tabs in .tsv")
    if any("\0" in name for name in schema.names):
        raise ValueError("the names of its columns hold NUL characters, as UTF-16 does, so convert it to UTF-8")
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    return Columns(schema.names, schema.names, texts)


def csv_texts(stream: BinaryIO, delimiter: str, column: str, skip: bool) -> Iterator[pa.Array]:
    """The fields of a column as arrays of strings.

    A row with more or fewer fields than columns raises BadRow; with `skip` it counts as a null at the end.
    """
    bad = []

    def handle(row: csv.InvalidRow) -> str:
        bad.append(row)
        return "skip" if skip else "error"

    convert = csv.ConvertOptions(include_columns=[column], column_types={column: pa.string()})
    try:
        for batch in _reader(stream, delimiter, convert, handle):
            yield batch.column(0)
    except pa.ArrowInvalid as error:
        if not bad or skip:
            raise
        row = bad[0]
        # The line of the names is not a row of data.
        raise BadRow(row.number - 1, f"has {row.actual_columns} fields instead of {row.expected_columns}") from error
    yield pa.nulls(len(bad), pa.string())


def _reader(stream: BinaryIO, delimiter: str, convert, handle_invalid_row) -> csv.CSVStreamingReader:
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=handle_invalid_row)
    # Only one thread numbers the rows.
    read = csv.ReadOptions(use_threads=False, block_size=_BYTES)
    return csv.open_csv(stream, read, parse, convert)
