"""Reads a checkpoint's manifest as untrusted input: checks its fields, and which files may be read.

Checkpoints are copied between machines and people. A file is opened only after a check that it is a regular file in
the folder, and files that the manifest does not list are never read.
"""

import hashlib
import json
import os
import re
import stat
from pathlib import Path

from hope_hf.cli.files import is_inside
from hope_hf.cli.weights import parts_of

MANIFEST = "manifest.json"
# Increased when the other files change; a version reads only its own format.
FORMAT = 2
MEND = "resume from another checkpoint"

# A folder is `.replaced` while a newer one of the same step takes its name.
FOLDER_NAME = re.compile(r"checkpoint-(\d+)(\.replaced)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63 - 1
# The manifest of ten thousand processes has 5 MB.
_MOST_BYTES = 64 * 2**20


def seal(content: dict) -> str:
    """The hash over a manifest's other fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> dict:
    """The manifest of a checkpoint, every field checked; the files it lists are not.

    Returns:
        `format`, `step`, `files` (size and SHA-256 by relative path), and the facts given to `publish`.

    Raises:
        ValueError: there is none, it was changed, or a field is invalid.
    """
    if not os.path.isdir(folder):
        raise ValueError(f"{folder} is not a folder: name a checkpoint-<step> of a run.")
    file = folder / MANIFEST
    try:
        if file_size(folder, MANIFEST) > _MOST_BYTES:
            raise ValueError("too large")
        manifest = json.loads(file.read_text(encoding="utf-8"))
        unchanged = manifest.pop("sha256") == seal(manifest)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {MANIFEST}, so it was never finished: {MEND}.") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{file} cannot be read: {MEND}.") from None
    if not unchanged:
        raise ValueError(f"{file} was changed after it was written: {MEND}.")
    wrong = _impossible(manifest, folder.name)
    if wrong is not None:
        raise ValueError(f"{file} is no checkpoint's, see its {wrong}: {MEND}.")
    return manifest


def file_size(folder: Path, name: str) -> int:
    """Bytes of a checkpoint's file, without opening it: opening a pipe would block forever.

    Raises OSError where there is none, and ValueError for anything but a regular file in the folder.
    """
    path = folder / name
    status = path.stat()
    inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    if not inside or not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file of the checkpoint's own, but a link, pipe, device or folder: {MEND}.")
    return status.st_size


def listed(folder: Path, name: str) -> Path:
    """The path of a file that the checkpoint's manifest lists; ValueError where it does not."""
    if name not in read_manifest(folder)["files"]:
        raise ValueError(f"{folder / MANIFEST} lists no {name}: {MEND}.")
    return folder / name


def weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors of the model, all of them listed; ValueError where one is not."""
    index = "model.safetensors.index.json"
    if index not in read_manifest(folder)["files"]:
        return [listed(folder, "model.safetensors")]
    return [listed(folder, name) for name in parts_of(folder / index)]


def _impossible(manifest: dict, folder_name: str) -> str | None:
    """The first field that `publish` cannot have written."""
    named = FOLDER_NAME.fullmatch(folder_name)
    step, files = manifest.get("step"), manifest.get("files")
    if not _is_count(step) or (named and int(named[1]) != step):
        return "step"
    if manifest.get("format", 1) == FORMAT:
        if not _is_count(manifest.get("num_processes"), least=1):
            return "num_processes"
        if type(manifest.get("only_model")) is not bool:
            return "only_model"
    if not isinstance(files, dict):
        return "files"
    for name, entry in files.items():
        if not is_inside(name) or name == MANIFEST:
            return f"file {name!r}"
        if not isinstance(entry, dict) or not _is_count(entry.get("size")) or not _is_hash(entry.get("sha256")):
            return f"entry of {name}"
    return None


def _is_count(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= _LARGEST


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and _SHA256.fullmatch(value) is not None
