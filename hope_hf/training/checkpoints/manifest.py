"""Checkpoint folders `checkpoint-<step>/`: only complete ones are chosen, verified by the manifest inside."""

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from .seal import FOLDER_NAME, FORMAT, MANIFEST, MEND, file_size, read_manifest, seal


def temporary_name(output_dir: Path, step: int) -> Path:
    """A new name for a checkpoint being written; a killed process that is still writing never shares it."""
    return output_dir / f"checkpoint-{step}.tmp-{uuid.uuid4().hex[:8]}"


def remove_leftovers(output_dir: Path) -> None:
    """Delete what killed processes left half written, half deleted or replaced."""
    for folder in output_dir.glob("checkpoint-*.tmp-*"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in output_dir.glob("checkpoint-*.replaced"):
        if _has_all_bytes(folder.with_suffix("")):
            _remove(folder)


def describe(folder: Path, paths: list[Path]) -> dict[str, dict]:
    """The manifest's entries of some of the folder's files, each synced to disk; folders among them are skipped."""
    files = {}
    for path in sorted(path for path in paths if path.is_file()):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    return files


def publish(folder: Path, step: int, facts: dict, files: dict[str, dict]) -> Path:
    """Seal a written folder with its manifest and give it its final name.

    Args:
        folder: from `temporary_name`, everything else already in it.
        step: optimizer steps done.
        facts: JSON-able; `verify` returns them.
        files: from `describe`, all files in the folder.

    Returns:
        `checkpoint-<step>` next to `folder`. At every moment it or the previous one is complete on disk.
    """
    content = {"format": FORMAT, "step": step, **facts, "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as handle:
        json.dump({**content, "sha256": seal(content)}, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    for directory in {folder, *(path for path in folder.rglob("*") if path.is_dir())}:
        _sync_directory(directory)

    final = folder.with_name(f"checkpoint-{step}")
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        if replaced.exists():
            _remove(replaced)
        final.rename(replaced)
    folder.rename(final)
    _sync_directory(final.parent)
    if replaced.exists():
        _remove(replaced)
    return final


def verify(folder: Path) -> dict:
    """Read every byte of a checkpoint and compare it with its manifest.

    Returns:
        The manifest, as `read_manifest` does.

    Raises:
        ValueError: unfinished, truncated, changed or invalid.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest["files"].items():
        path = folder / name
        try:
            size = file_size(folder, name)
            changed = size == expected["size"] and _sha256(path) != expected["sha256"]
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): {MEND}.") from error
        if size != expected["size"]:
            raise ValueError(f"{path} has {size} bytes instead of {expected['size']}: {MEND}.")
        if changed:
            raise ValueError(f"{path} was changed after it was written (SHA-256 differs): {MEND}.")
    return manifest


def latest_checkpoint(output_dir: str | Path) -> Path | None:
    """The newest checkpoint in `output_dir` whose manifest verifies; None if there is none at all.

    Warns of every newer one that it skips.

    Raises:
        ValueError: there are checkpoints, and none of them is complete.
    """
    problem = None
    for folder in _checkpoints(Path(output_dir)):
        try:
            verify(folder)
        except ValueError as error:
            problem = problem or error
            warnings.warn(f"Not chosen: {error}", stacklevel=2)
        else:
            return folder
    if problem is not None:
        raise ValueError(f"{output_dir} holds no complete checkpoint; delete its checkpoint folders to begin again.")
    return None


def last_good(output_dir: str | Path) -> str:
    """The newest checkpoint that verifies, in words for the user."""
    try:
        return str(latest_checkpoint(output_dir) or "none was written yet")
    except ValueError:
        return "none is complete"


def rotate(
    output_dir: Path, newest: Path, save_total_limit: int | None, in_use: Collection[Path] = frozenset()
) -> None:
    """Delete the oldest checkpoints until `save_total_limit` complete ones are left.

    `newest` always stays, and those `in_use` stay besides. Broken ones do not count, and are deleted with the old
    ones. None keeps all.
    """
    if save_total_limit is None:
        return
    older = [folder for folder in _checkpoints(output_dir) if folder != newest and _step(folder) <= _step(newest)]
    # Sizes are enough here: the newest was just sealed, and reading all others would double the time of a save.
    keep = [folder for folder in older if _has_all_bytes(folder)][: max(0, save_total_limit - 1)]
    for folder in older:
        if folder not in keep and folder not in in_use:
            _remove(folder)


def _checkpoints(output_dir: Path) -> list[Path]:
    """Newest first; of two of the same step, the one with the final name first."""
    folders = [path for path in output_dir.glob("checkpoint-*") if FOLDER_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(folders, key=lambda path: (-_step(path), path.name))


def _step(folder: Path) -> int:
    return int(FOLDER_NAME.fullmatch(folder.name)[1])


def _has_all_bytes(folder: Path) -> bool:
    try:
        files = read_manifest(folder)["files"]
        return all(file_size(folder, name) == entry["size"] for name, entry in files.items())
    except (OSError, ValueError):
        return False


def _remove(folder: Path) -> None:
    # Renamed first, so that a kill leaves no partial checkpoint under a checkpoint's name.
    doomed = folder.with_name(f"{folder.name}.tmp-{uuid.uuid4().hex[:8]}")
    # It may already be deleted.
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
