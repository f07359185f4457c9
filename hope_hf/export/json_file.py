"""Reads JSON files from outside, with a one-sentence error."""

import json
from pathlib import Path


def read_object(path: Path, fix: str) -> dict:
    """The object in a JSON file; ValueError that names the file and ends in `fix`."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {fix}.") from None
    except (OSError, ValueError):
        raise ValueError(f"{path} cannot be read as JSON: {fix}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no JSON object: {fix}.")
    return record
