"""The rows of .csv and .tsv files whose first line names the columns; fields in quotes may hold line ends."""

import re
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.csv

from .compressed import open_bytes, unpacked_name
from .json_files import BadRow

# Bytes read together; a row must fit into them.
_BYTES = 1 << 25
# By the sign between columns, signs in the name of an only column that say that another one stands there.
_NO_COLUMNS = {",": "[;\t|]", "\t": "[,;|]"}


def csv_has_no_rows(path: str) -> bool:
    """Whether a file holds at most the names of its columns."""
    with open_bytes(path) as file:
        file.readline()
        return not any(map(bytes.strip, file))


def csv_columns(path: str) -> tuple[list[str], list[str], list[str]]:
    """Names of the columns: all, twice (any may be read as strings), and those that hold more than numbers and dates.

    The first rows decide.
    """
    with open_bytes(path) as file:
        schema = _open(path, file, pyarrow.csv.ConvertOptions(), lambda row: "skip").schema
    # a comma in a .csv file's only name is one in quotes
    if len(schema) == 1 and re.search(_NO_COLUMNS[_delimiter(path)], name := schema.names[0]):
        raise ValueError(f"its only column is {name!r}, so separate columns by commas in .csv and by tabs in .tsv")
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    return schema.names, schema.names, texts


def csv_texts(path: str, column: str, skip: bool) -> Iterator[pa.Array]:
    """The fields of a column as arrays of strings.

    A row with more or fewer fields than columns raises BadRow; with `skip` it counts as a null at the end.
    """
    bad = []

    def judge(row: pyarrow.csv.InvalidRow) -> str:
        bad.append(row)
        return "skip" if skip else "error"

    convert = pyarrow.csv.ConvertOptions(include_columns=[column], column_types={column: pa.string()})
    with open_bytes(path) as file:
        try:
            for batch in _open(path, file, convert, judge):
                yield batch.column(0)
        except pa.ArrowInvalid as error:
            if not bad or skip:
                raise
            (row,) = bad
            what = f"has {row.actual_columns} fields instead of {row.expected_columns}"
            # The line of the names is not a row of data.
            raise BadRow(row.number - 1, what) from error
    yield pa.nulls(len(bad), pa.string())


def _delimiter(path: str) -> str:
    return "\t" if re.search(r"\.tsv$", unpacked_name(path), re.IGNORECASE) else ","


def _open(path: str, file, convert: pyarrow.csv.ConvertOptions, judge) -> pyarrow.csv.CSVStreamingReader:
    parse = pyarrow.csv.ParseOptions(
        delimiter=_delimiter(path),
        newlines_in_values=True,
        invalid_row_handler=judge,
    )
    # Only one thread numbers the rows.
    read = pyarrow.csv.ReadOptions(use_threads=False, block_size=_BYTES)
    return pyarrow.csv.open_csv(file, read, parse, convert)
