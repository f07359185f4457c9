"""Finds and reads reports of earlier evaluations."""

import json
import os
from copy import copy
from pathlib import Path

from hope_hf.common.files import is_inside, read_small
from hope_hf.common.process import one_line
from hope_hf.common.results import RESULTS_FILE, SCHEMA_VERSION

# Fields with their types, and their values where a report lacks them.
FIELDS = {
    "model": (dict | None, None),
    "seconds": (int | float, 0.0),
    "unfinished": (list, []),
    "pictures": (dict, {}),
}


def find_report(run: str, flag: str) -> Path:
    """The report that `run` names: a file, a folder with results.json, or the newest in an archive's folder.

    Raises ValueError naming `flag`.
    """
    path = Path(run)
    # Unlike those of a Path, these take a name that is too long. A pipe is refused when it is read.
    if os.path.exists(path) and not os.path.isdir(path):
        return path
    report = path / RESULTS_FILE
    if os.path.isfile(report):
        return report
    # Archived reports are named by their time.
    archived = path.glob("*Z*.json") if os.path.isdir(path) else ()
    newest = max(archived, key=_time_and_number, default=None)
    if newest is None:
        raise ValueError(f"{flag} {run} holds no {RESULTS_FILE} and no archived report: name what hope-hf eval wrote.")
    return newest


def _time_and_number(path: Path) -> tuple[str, int]:
    """Of an archived report: a second one of the same second ends on -2."""
    time, _, ending = path.stem.rpartition("Z")
    number = ending.removeprefix("-")
    return time, int(number) if number.isdecimal() else 1


def read_report(path: Path, flag: str) -> dict:
    """The record of a report, its fields checked. Raises ValueError naming `flag` if the file is not a report."""
    try:
        record = json.loads(read_small(path), parse_constant=_refuse)
        if not isinstance(record, dict):
            raise ValueError("it holds no fields")
        version = record["schema_version"]
        if version == SCHEMA_VERSION:
            _check(record)
            return record
    # RecursionError: thousands of nested brackets.
    except (OSError, ValueError, KeyError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{flag} {path} is no report of hope-hf eval: {reason}.") from None
    raise ValueError(f"{flag} {path} has schema_version {version!r}, not {SCHEMA_VERSION}: evaluate again.")


def _refuse(word: str):
    raise ValueError(f"{word} is no number of a report")


def _check(record: dict):
    """Raise ValueError for the first field of a wrong type; add the fields that older reports lack."""
    for name, (kind, default) in FIELDS.items():
        record.setdefault(name, copy(default))
        _require(record, name, kind)
    model = record["model"] or {}
    for name in ("step", "tokens"):
        if not is_count(model.get(name)):
            raise ValueError(f"{name} of model is {model[name]!r}")
    if not _is_list_of(str, record["unfinished"]):
        raise ValueError("unfinished is no list of names")
    for suite, files in record["pictures"].items():
        if not isinstance(files, list) or not all(map(is_inside, files)):
            raise ValueError(f"pictures of {suite} is no list of files")
    _require(record, "config", dict)
    results = _require(record, "results", dict)
    for suite in results:
        # The suite's name becomes part of a picture's name.
        if not suite.isidentifier():
            raise ValueError(f"{suite!r} is no suite")
        _check_result(suite, _require(results, suite, dict))


def _check_result(suite: str, result: dict):
    tables = _require(result, "tables", dict)
    defaults = {"summary": [], "samples": {}, "text": ""}
    for name, default in defaults.items():
        result.setdefault(name, default)
        _require(result, name, type(default))
    for rows in (*tables.values(), result["summary"]):
        if not _is_list_of(dict, rows):
            raise ValueError(f"a table of {suite} is no list of rows")


def _is_list_of(kind: type, values: object) -> bool:
    # Values of JSON have one of these types exactly.
    return isinstance(values, list) and set(map(type, values)) <= {kind}


def _require(record: dict, name: str, kind):
    """The field; ValueError if it is missing or of another type."""
    if name not in record:
        raise ValueError(f"{name} is missing")
    if not isinstance(record[name], kind):
        raise ValueError(f"{name} is {record[name]!r:.80}")
    return record[name]


def is_count(value: object) -> bool:
    """Whether it is None or a number of steps or tokens."""
    return value is None or (isinstance(value, int) and 0 <= value < 2**63)


def run_name(model: str) -> str:
    """The run's name for a model's folder or Hub name; for a checkpoint, that of the folder it lies in."""
    path = Path(model)
    if path.exists():
        path = Path(os.path.abspath(model))
    # A run's link `latest` has the name of its checkpoint.
    is_checkpoint = path.resolve().name.startswith("checkpoint-")
    return path.parent.name if is_checkpoint else path.name
