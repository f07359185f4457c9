"""The columns and rows of .parquet and .arrow files."""

import json
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet

from .document_file import Columns

# Number of rows that are read together.
_ROWS = 100


class Table:
    """An open file of rows: `schema`, and its batches, of which only the columns asked for are kept."""

    def __init__(self, kind: str, stream: BinaryIO):
        """`kind`: parquet or arrow."""
        self._parquet = None
        self._arrow = None
        if kind == "parquet":
            # Read page by page, since a group of rows may be larger than the memory.
            self._parquet = pyarrow.parquet.ParquetFile(stream, pre_buffer=False, buffer_size=1 << 20)
            self.schema = self._parquet.schema_arrow
            return
        # `datasets` writes the stream format, other programs the file format.
        self._is_arrow_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        self._arrow = pa.ipc.open_file(stream) if self._is_arrow_file else pa.ipc.open_stream(stream)
        self.schema = self._arrow.schema

    def has_no_rows(self) -> bool:
        """Whether there is no row."""
        if self._parquet is not None:
            return self._parquet.metadata.num_rows == 0
        return not any(batch.num_rows for batch in self._arrow_batches())

    def columns(self) -> Columns:
        """The columns, and those of strings in any encoding."""
        strings = [field.name for field in self.schema if is_string(field.type)]
        return Columns(self.schema.names, strings, strings)

    def batches(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The rows, some together."""
        if self._parquet is not None:
            yield from self._parquet.iter_batches(_ROWS, columns=columns)
        else:
            for batch in self._arrow_batches():
                yield batch.select(columns)

    def rows(self, columns: list[str]) -> Iterator[dict]:
        """The rows as Python's values, those of JSON read."""
        for batch in self.batches(columns):
            for row in batch.to_pylist():
                yield {field.name: _read_json(row[field.name], field.type) for field in batch.schema}

    def texts(self, column: str) -> Iterator[pa.Array]:
        """The strings of a column, as arrays."""
        for batch in self.batches([column]):
            yield batch.column(0).cast(pa.string())

    def _arrow_batches(self) -> Iterator[pa.RecordBatch]:
        if not self._is_arrow_file:
            yield from self._arrow
            return
        for index in range(self._arrow.num_record_batches):
            yield self._arrow.get_batch(index)


def _read_json(value: object, kind: pa.DataType) -> object:
    """A value, in which JSON that `datasets` and DuckDB keep as strings is what it says."""
    if value is None:
        return None
    if isinstance(kind, pa.BaseExtensionType) and kind.extension_name == "arrow.json":
        return json.loads(value)
    if pa.types.is_struct(kind):
        return {field.name: _read_json(value[field.name], field.type) for field in kind}
    if isinstance(kind, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return [_read_json(part, kind.value_type) for part in value]
    return value


def is_string(kind: pa.DataType) -> bool:
    """Whether a column of this type holds strings, in any encoding."""
    if pa.types.is_dictionary(kind):
        return is_string(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
