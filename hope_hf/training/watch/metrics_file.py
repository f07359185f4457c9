"""`metrics.jsonl`: the rows of a run, and the curve of one of its metrics."""

import json
from pathlib import Path

from hope_hf.common.files import LARGEST_METRICS, read_small
from hope_hf.common.process import one_line

METRICS_FILE = "metrics.jsonl"
ALL = "all"
"""Stands for the layer in names of rows of all layers together."""
# Pictures cannot show larger values.
LARGEST_VALUE = 1e300
COUNTERS = ("step", "tokens")


def read_metrics(output_dir: str | Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; a last row cut off by a crash is left out.

    Raises ValueError if it cannot be read or has other rows.
    """
    file = Path(output_dir) / METRICS_FILE
    try:
        lines = read_small(file, LARGEST_METRICS).splitlines()
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read ({one_line(error)}): put the run's own file there.") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        # RecursionError: thousands of nested brackets.
        except (ValueError, RecursionError):
            row = None
        if _is_row(row):
            rows.append(row)
        elif number < len(lines):
            raise ValueError(f"{file}, line {number}, is no row of metrics: remove the line.")
    return rows


def _is_row(row: object) -> bool:
    if not isinstance(row, dict):
        return False
    for name in COUNTERS:
        if type(row.get(name)) is not int or not 0 <= row[name] < 2**63:
            return False
    return True


def curve(rows: list[dict], name: str) -> list[tuple[int, float]]:
    """The tokens and the value of each row that has a number of this name."""
    points = []
    for row in rows:
        value = row.get(name)
        if type(value) in (int, float) and abs(value) < LARGEST_VALUE:
            points.append((row["tokens"], value))
    return points
