"""Files that hold no rows, of every kind."""

import os

from .csv_files import csv_has_no_rows
from .document_file import WRONG_CONTENT, open_document_file
from .json_files import json_has_no_rows
from .table_files import Table


def has_no_rows(path: str) -> bool:
    """Whether a file is empty, or a table without rows, as Spark and pandas write them."""
    if os.path.getsize(path) == 0:
        return True
    try:
        with open_document_file(path) as (kind, stream):
            if kind == "text":
                return not stream.read(1)
            if kind == "json":
                return json_has_no_rows(stream)
            if kind in ("csv", "tsv"):
                return csv_has_no_rows(stream)
            return Table(kind, stream).has_no_rows()
    except WRONG_CONTENT:
        # Reading it reports what is wrong.
        return False
