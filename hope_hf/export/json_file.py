"""Reads JSON files from outside, with a one-sentence error."""

import json
from pathlib import Path

from hope_hf.cli.files import read_small


def read_object(path: Path, fix: str) -> dict:
    """The object in a JSON file; ValueError that names the file and ends in `fix`."""
    try:
        record = json.loads(read_small(path))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {fix}.") from None
    # RecursionError: thousands of nested brackets.
    except (OSError, ValueError, RecursionError):
        raise ValueError(f"{path} cannot be read as JSON: {fix}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no JSON object: {fix}.")
    return record
