"""Checks of the folders that a program writes to."""

import os
from pathlib import Path


def check_output(path: str, flag: str):
    """Raise ValueError that names `flag` if `path` is a file, or no folder can be made or written there."""
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
