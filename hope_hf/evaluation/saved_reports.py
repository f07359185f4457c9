"""Reports that were written before: found and read."""

import json
import os
from pathlib import Path

from hope_hf.cli.mistakes import one_line
from hope_hf.cli.tables import RESULTS_FILE, SCHEMA_VERSION


def find_report(run: str, flag: str) -> Path:
    """The report that `run` names: a file, a folder with results.json, or an archive's folder, of which the newest.

    Raises ValueError naming `flag`.
    """
    path = Path(run)
    if path.is_file():
        return path
    # Archived reports are named by their time.
    found = [path / RESULTS_FILE] if (path / RESULTS_FILE).is_file() else sorted(path.glob("*Z*.json"))
    if not found:
        raise ValueError(f"{flag} {run} holds no {RESULTS_FILE} and no archived report: name what run_eval.py wrote.")
    return found[-1]


def read_report(path: Path, flag: str) -> dict:
    """The record of a report. Raises ValueError naming `flag` where it is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        version = record["schema_version"]
        complete = isinstance(record["config"], dict) and all("tables" in one for one in record["results"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{flag} {path} is no report of run_eval.py: {one_line(error)}.") from None
    if version != SCHEMA_VERSION or not complete:
        raise ValueError(f"{flag} {path} has schema_version {version!r}, not {SCHEMA_VERSION}: evaluate again.")
    return record


def run_name(model: str) -> str:
    """The run's name of a model's folder or Hub name: of a checkpoint that of the folder it lies in."""
    path = Path(os.path.abspath(model)) if os.path.exists(model) else Path(model)
    return path.parent.name if path.name.startswith("checkpoint-") else path.name
