"""The folders that a program is told to write."""

import os
from pathlib import Path


def check_output(path: str, flag: str):
    """ValueError that names `flag` where no folder can be at `path`, or none be made there."""
    folder = Path(path)
    try:
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{flag} {folder} is a file: name a folder.")
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    except OSError as error:
        # A name that is too long.
        raise ValueError(f"{flag} {folder} cannot be written: {error.strerror}.") from None
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{flag} {folder} cannot be written: {nearest} is a file or read-only.")
