"""Finds and reads reports of earlier evaluations."""

import json
import os
from pathlib import Path

from hope_hf.common.files import is_inside, read_small
from hope_hf.common.process import one_line
from hope_hf.common.results import RESULTS_FILE, SCHEMA_VERSION

# Larger than any number of a report; differences and pictures of larger numbers would overflow.
LARGEST = 1e100


def find_report(run: str, flag: str) -> Path:
    """The report that `run` names: a file, a folder with results.json, or the newest in an archive's folder.

    Raises ValueError naming `flag`.
    """
    path = Path(run)
    # A pipe is refused when it is read.
    if path.exists() and not path.is_dir():
        return path
    if (path / RESULTS_FILE).is_file():
        return path / RESULTS_FILE
    # Archived reports are named by their time.
    newest = max(path.glob("*Z*.json"), key=_time_and_number, default=None)
    if newest is None:
        raise ValueError(f"{flag} {run} holds no {RESULTS_FILE} and no archived report: name what hope-hf eval wrote.")
    return newest


def _time_and_number(path: Path) -> tuple[str, int]:
    """Of an archived report: a second one of the same second ends on -2."""
    time, _, number = path.stem.rpartition("Z")
    return time, int(number.removeprefix("-")) if number.removeprefix("-").isdecimal() else 1


def read_report(path: Path, flag: str) -> dict:
    """The record of a report, its fields checked. Raises ValueError naming `flag` if the file is not a report."""
    try:
        record = json.loads(read_small(path), parse_constant=_refuse)
        if not isinstance(record, dict):
            raise ValueError("it holds no fields")
        version = record["schema_version"]
        if version == SCHEMA_VERSION:
            _check(record)
    # RecursionError: thousands of nested brackets.
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{flag} {path} is no report of hope-hf eval: {reason}.") from None
    if version != SCHEMA_VERSION:
        raise ValueError(f"{flag} {path} has schema_version {version!r}, not {SCHEMA_VERSION}: evaluate again.")
    return record


def _refuse(word: str):
    raise ValueError(f"{word} is no number of a report")


def _check(record: dict):
    """Raise ValueError for the first field of a wrong type; add the fields that older reports lack."""
    for name, value in (("model", None), ("seconds", 0.0), ("unfinished", []), ("pictures", {})):
        record.setdefault(name, value)
    kinds = {"config": dict, "seconds": int | float, "model": dict | None, "unfinished": list, "pictures": dict}
    for name, kind in kinds.items():
        _require(record, name, kind)
    for name in ("step", "tokens"):
        if not is_count((record["model"] or {}).get(name, 0)):
            raise ValueError(f"{name} of model is {record['model'][name]!r}")
    if not all(isinstance(name, str) for name in record["unfinished"]):
        raise ValueError("unfinished is no list of names")
    for suite, files in record["pictures"].items():
        if not isinstance(files, list) or not all(is_inside(file) for file in files):
            raise ValueError(f"pictures of {suite} is no list of files")
    for suite, result in _require(record, "results", dict).items():
        # The suite's name becomes part of a picture's name.
        if not suite.isidentifier():
            raise ValueError(f"{suite!r} is no suite")
        result = _require(record["results"], suite, dict)
        tables = list(_require(result, "tables", dict).items())
        for title, rows in [*tables, ("summary", result.setdefault("summary", []))]:
            if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
                raise ValueError(f"{title!r} of {suite} is no list of rows")
            for row in rows:
                _check_row(row, f"{title!r} of {suite}")
        result.setdefault("samples", {})
        result.setdefault("text", "")
        _require(result, "samples", dict)
        _require(result, "text", str)


def _check_row(row: dict, where: str):
    for name, value in row.items():
        if isinstance(value, int | float) and not -LARGEST < value < LARGEST:
            raise ValueError(f"{name} in {where} is too large")
        is_of_its_kind = isinstance(value, str | int | float | None)
        if name.endswith("_stderr"):
            is_of_its_kind = value is None or (isinstance(value, int | float) and value >= 0)
        if name == "metric":
            is_of_its_kind = isinstance(value, str)
        if not is_of_its_kind:
            raise ValueError(f"{name} in {where} is {value!r:.80}")


def _require(record: dict, name: str, kind):
    if name not in record or not isinstance(record[name], kind):
        raise ValueError(f"{name} is {record.get(name)!r:.80}" if name in record else f"{name} is missing")
    return record[name]


def is_count(value: object) -> bool:
    """Whether it is None or a number of steps or tokens."""
    return value is None or (isinstance(value, int) and 0 <= value < 2**63)


def run_name(model: str) -> str:
    """The run's name for a model's folder or Hub name; for a checkpoint, that of the folder it lies in."""
    path = Path(os.path.abspath(model)) if os.path.exists(model) else Path(model)
    is_checkpoint = os.path.basename(os.path.realpath(path)).startswith("checkpoint-")
    return path.parent.name if is_checkpoint else path.name
