"""The file that describes a folder of shards, and whether it is there."""

import os
from pathlib import Path

MANIFEST = "manifest.json"


def require_shards(path: str, flag: str) -> None:
    """Raise ValueError that names the flag if the folder of shards, or its manifest, does not exist."""
    folder = Path(path)
    # Unlike Path.is_dir, it returns False for a name that is too long.
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {folder} is not a folder: name one that hope-hf prepare wrote.")
    if not os.path.lexists(folder / MANIFEST):
        raise ValueError(f"{flag} {folder} has no {MANIFEST}: finish it with hope-hf prepare.")
