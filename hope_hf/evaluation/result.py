"""The result of a suite, its numbers one by one, and standard errors."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hope_hf.common.results import Row

# Columns that identify a row.
LABELS = frozenset({"length", "depth", "layer", "head", "tokens", "num_fewshot", "step", "level"})
# Columns that give the number of samples, or describe a task.
COUNTS = frozenset(
    {"n", "documents", "steps", "parameters", "seconds", "keys", "values_per_key", "keys_asked_for", "bytes"}
)

# Columns of words that differ between reports of the same numbers: lm-eval's task version, the model that a benchmark
# trained, and where it was best or ended; a metric names the number.
NO_LABELS = frozenset({"version", "metric", "model", "best_step", "ends_at"})


class CannotRun(ValueError):
    """A suite cannot run on this model, or no longer: no mistake in the flags or in a file."""


TEXT_TABLE = "Text: "
"""Begins the title of a table of one text; the text's name follows."""


@dataclass
class SuiteResult:
    """Tables, pictures and text of one suite, written when the suite has ended.

    tables: title -> rows; one without rows is left out. All rows of a table have the same keys. A number `x` with a
        key `x_stderr` is shown as `x ± x_stderr`; `n` is the number of samples of a row. Values are JSON-able.
    pictures: file name -> function that draws it to the path given.
    samples: name -> rows that are written into the report.
    logs: file name without ending -> rows for a file of JSON lines beside it.
    text: shown and written as it is.
    summary: the main numbers, from `summary_row`.
    """

    tables: dict[str, list[Row]] = field(default_factory=dict)
    pictures: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    samples: dict[str, list[Row]] = field(default_factory=dict)
    logs: dict[str, list[dict]] = field(default_factory=dict)
    text: str = ""
    summary: list[Row] = field(default_factory=list)

    def __post_init__(self):
        # such as passages of a model that recalls nothing
        self.tables = {title: rows for title, rows in self.tables.items() if rows}


def summary_row(number: str, value: float, stderr: float | None, chance: float | None = None) -> Row:
    """A number of a suite; `chance`: its value for a uniform guess; None if there is none."""
    return {"number": number, "value": value, "value_stderr": stderr, "chance": chance}


class Number(NamedTuple):
    """A value and its standard error; None where it is not known."""

    value: float | None
    stderr: float | None


UNKNOWN = Number(None, None)


def put(row: Row, name: str, number: Number) -> None:
    """Add a number to a row."""
    row[name], row[f"{name}_stderr"] = number


def means(columns: dict[str, Sequence[float]]) -> Row:
    """A row of the columns' means and standard errors; all have a value per sample."""
    row: Row = {}
    for name, values in columns.items():
        row["n"] = len(values)
        put(row, name, mean_and_stderr(values))
    return row


def mean_and_stderr(values: Sequence[float]) -> Number:
    """Mean and its standard error (n - 1 in the variance); None for the error of a single value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Number(mean, None)
    squares = math.fsum((value - mean) ** 2 for value in values)
    variance = squares / (count - 1)
    return Number(mean, math.sqrt(variance / count))


class Key(NamedTuple):
    """The place of a number in a report."""

    suite: str
    table: str
    row: str
    name: str

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


def numbers(results: dict[str, dict]) -> dict[Key, Number]:
    """The numbers in `results` of a report, in its order. Numbers in the column `value` are named by metric."""
    by_key = {}
    for suite, result in results.items():
        for table, rows in result["tables"].items():
            for row in rows:
                label = _label(row)
                for name, number in _numbers_of_row(row).items():
                    by_key[Key(suite, table, label, name)] = number
    return by_key


def _numbers_of_row(row: Row) -> dict[str, Number]:
    """By name, in the row's order."""
    by_name = {}
    for column, value in row.items():
        if _is_result(column, value):
            name = row.get("metric", column) if column == "value" else column
            by_name[name] = Number(float(value), row.get(f"{column}_stderr"))
    return by_name


def _is_result(column: str, value) -> bool:
    """Whether a cell is a number that was measured."""
    if column in LABELS or column in COUNTS or column.endswith("_stderr"):
        return False
    return isinstance(value, int | float)


def _label(row: Row) -> str:
    """The words of a row, and the numbers that identify it."""
    words = []
    for column, value in row.items():
        if isinstance(value, str):
            if column not in NO_LABELS:
                words.append(value)
        elif column in LABELS and value is not None:
            shown = f"{value:g}" if isinstance(value, float) else f"{value:,}"
            words.append(f"{column} {shown}")
    return ", ".join(filter(None, words))
