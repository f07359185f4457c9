"""Checkpoint folders `checkpoint-<step>/` and the manifest in each, which lists its files with sizes and SHA-256.

The manifest is written last, so a folder without one was never finished. It is parsed once and handed on as a
`Manifest`. Checkpoints are copied between machines and people: every field is checked, a file is opened only after a
check that it is a regular file in the folder, and files that the manifest does not list are never read.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import uuid
import warnings
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hope_hf.common.files import (
    CHECKPOINT,
    flush_folder,
    flush_to_disk,
    is_inside,
    is_unfinished,
    read_small,
    unfinished,
)
from hope_hf.common.weight_names import ADAPTER_WEIGHTS, PART, parts_of

MANIFEST = "manifest.json"
# Increased when the other files change; a version reads only its own format.
FORMAT = 2
BEST = "best"
"""The folder of `--keep_best`, beside the checkpoints."""
LATEST = "latest"
"""A link to the newest complete checkpoint, for other programs; a run itself never follows it."""
FIX = "resume from another checkpoint"

# A folder is `.replaced` while a newer one of the same step takes its name.
FOLDER_NAME = re.compile(CHECKPOINT.pattern + r"(\.replaced-[0-9a-z]+)?")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint's manifest, every field checked.

    Attributes:
        folder: the checkpoint.
        step: optimizer steps done.
        files: size in bytes and SHA-256 by relative path.
        facts: the other fields, `format` and those given to `publish`.
    """

    folder: Path
    step: int
    files: dict[str, dict]
    facts: dict

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(entry["size"] for entry in self.files.values())

    def path(self, name: str) -> Path:
        """The path of a listed file; ValueError if it is not listed."""
        if name not in self.files:
            raise ValueError(f"{self.folder / MANIFEST} lists no {name}: {FIX}.")
        return self.folder / name

    def weight_files(self) -> list[Path]:
        """The safetensors of whole weights, or of an adapter; ValueError if one is not listed."""
        if ADAPTER_WEIGHTS in self.files:
            return [self.path(ADAPTER_WEIGHTS)]
        index = "model.safetensors.index.json"
        names = parts_of(self.folder / index) if index in self.files else ["model.safetensors"]
        return [self.path(name) for name in names]

    def part_files(self) -> list[Path]:
        """The weights of each process (`--save_sharded`); empty if weights are whole."""
        return [self.folder / name for name in sorted(self.files) if PART.fullmatch(name)]


def seal(content: dict) -> str:
    """The hash over a manifest's other fields."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint; the files it lists are not looked at.

    Raises ValueError if there is none, it was changed, or a field is invalid.
    """
    if not os.path.isdir(folder):
        raise ValueError(f"{folder} is not a folder: name a checkpoint-<step> of a run.")
    file = folder / MANIFEST
    try:
        # Refuses a link to a file elsewhere.
        file_size(folder, MANIFEST)
        content = json.loads(read_small(file))
        unchanged = content.pop("sha256") == seal(content)
    except FileNotFoundError:
        raise ValueError(f"{folder} has no {MANIFEST}, so it was never finished: {FIX}.") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(f"{file} cannot be read: {FIX}.") from None
    if not unchanged:
        raise ValueError(f"{file} was changed after it was written: {FIX}.")
    wrong = _wrong_field(content, folder.name)
    if wrong is not None:
        raise ValueError(f"{file} is no checkpoint's, see its {wrong}: {FIX}.")
    return Manifest(folder, content.pop("step"), content.pop("files"), content)


def file_size(folder: Path, name: str) -> int:
    """Bytes of a checkpoint's file, without opening it: opening a pipe would block forever.

    Raises OSError if there is none, and ValueError for anything but a regular file in the folder.
    """
    path = folder / name
    status = path.stat()
    inside = Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
    if not inside or not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path} is not a file of the checkpoint's own, but a link, pipe, device or folder: {FIX}.")
    return status.st_size


def verify(folder: Path) -> Manifest:
    """The manifest of a checkpoint, after every byte of its files was compared with it.

    Raises ValueError if the checkpoint is unfinished, truncated, changed or invalid.
    """
    manifest = read_manifest(folder)
    for name, expected in manifest.files.items():
        path = folder / name
        try:
            size = file_size(folder, name)
            changed = size == expected["size"] and _sha256(path) != expected["sha256"]
        except OSError as error:
            raise ValueError(f"{path} cannot be read ({error.strerror}): {FIX}.") from error
        if size != expected["size"]:
            raise ValueError(f"{path} has {size} bytes instead of {expected['size']}: {FIX}.")
        if changed:
            raise ValueError(f"{path} was changed after it was written (SHA-256 differs): {FIX}.")
    return manifest


def latest_checkpoint(output_dir: str | Path) -> Manifest | None:
    """The newest checkpoint in `output_dir` that verifies; None if there is none at all.

    Warns of every newer one that it skips. Raises ValueError if there are checkpoints, and none is complete.
    """
    problem = None
    for folder in checkpoints_in(Path(output_dir)):
        try:
            return verify(folder)
        except ValueError as error:
            problem = problem or error
            warnings.warn(f"Not chosen: {error}", stacklevel=2)
    if problem is not None:
        raise ValueError(f"{output_dir} holds no complete checkpoint; delete its checkpoint folders to begin again.")
    return None


def no_latest(output_dir: Path) -> ValueError:
    """The error of `--resume_from_checkpoint latest` where there is none."""
    return ValueError(f"--resume_from_checkpoint latest: {output_dir} holds no checkpoint, so omit the flag to begin.")


def last_good(output_dir: str | Path) -> str:
    """A phrase for the user that names the newest checkpoint that verifies."""
    try:
        newest = latest_checkpoint(output_dir)
    except ValueError:
        return "none is complete"
    return "none was written yet" if newest is None else str(newest.folder)


def temporary_name(output_dir: Path, step: int, mark: str) -> Path:
    """A new name for a checkpoint being written; a killed process that is still writing never shares it.

    `mark`: the run's random id, by which it knows the folders that it made.
    """
    return _temporary(output_dir / f"checkpoint-{step}", mark)


def describe(folder: Path, paths: list[Path]) -> dict[str, dict]:
    """The manifest's entries of some of the folder's files, each synced to disk; folders among them are skipped."""
    files = {}
    for path in sorted(filter(Path.is_file, paths)):
        with path.open("rb") as handle:
            os.fsync(handle.fileno())
        name = path.relative_to(folder).as_posix()
        files[name] = {"size": path.stat().st_size, "sha256": _sha256(path)}
    return files


def publish(folder: Path, step: int, facts: dict, files: dict[str, dict], mark: str, name: str | None = None) -> Path:
    """Seal a written folder with its manifest and give it its final name.

    Args:
        folder: a folder named by `temporary_name` that holds everything else.
        step: optimizer steps done.
        facts: JSON-able, for `Manifest.facts`.
        files: the result of `describe` for all files in the folder.
        mark: that of `temporary_name`.
        name: the final name; None: `checkpoint-<step>`.

    Returns:
        The folder of that name next to `folder`. At every moment it or the previous one is complete on disk. What has
        the name and is not of this run gets another name, and a warning says so.
    """
    content = {"format": FORMAT, "step": step, "run": mark, **facts, "files": files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as handle:
        json.dump({**content, "sha256": seal(content)}, handle, indent=1)
        flush_to_disk(handle)
    flush_folder(folder)
    for path in folder.rglob("*"):
        if path.is_dir():
            flush_folder(path)

    final = folder.with_name(name or f"checkpoint-{step}")
    replaced = final.with_name(f"{final.name}.replaced-{mark}")
    if os.path.lexists(final):
        if _manifest_of_run(final, mark) is None:
            other = final.with_name(f"{final.name}.other-{uuid.uuid4().hex[:8]}")
            final.rename(other)
            warnings.warn(f"{final} was not of this run: it is now {other.name}.", stacklevel=2)
        else:
            if replaced.exists():
                _remove(replaced, mark)
            final.rename(replaced)
    folder.rename(final)
    flush_folder(final.parent)
    if replaced.exists():
        _remove(replaced, mark)
    if name is None:
        _point_to(final)
    return final


def _point_to(newest: Path) -> None:
    """Make `latest` a link to the checkpoint; what else has this name is the user's own and stays."""
    link = newest.with_name(LATEST)
    if os.path.lexists(link) and not (link.is_symlink() and CHECKPOINT.fullmatch(os.readlink(link))):
        return
    scratch = unfinished(link)
    # Some file systems have no links.
    with suppress(OSError):
        scratch.symlink_to(newest.name)
        scratch.replace(link)


def remove_leftovers(output_dir: Path, mark: str) -> None:
    """Delete folders that killed processes of the run `mark` left half written, half deleted or replaced."""
    # Of an unfinished folder, or of one that was being deleted.
    made = re.compile(rf"({CHECKPOINT.pattern}|{BEST})(\.replaced-{mark})?\.tmp-{mark}-[0-9a-f]{{8}}")
    for folder in output_dir.glob("*.tmp-*"):
        if made.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)
    for link in output_dir.glob(f"{LATEST}.tmp-*"):
        if link.is_symlink() and is_unfinished(link.name, LATEST):
            link.unlink(missing_ok=True)
    for folder in output_dir.glob(f"checkpoint-*.replaced-{mark}"):
        if _has_all_bytes(folder.with_suffix("")):
            _remove(folder, mark)
    best, replaced = output_dir / BEST, output_dir / f"{BEST}.replaced-{mark}"
    if replaced.is_dir():
        _remove(replaced, mark) if best.exists() else replaced.rename(best)


def rotate(
    output_dir: Path,
    newest: Path,
    mark: str,
    save_total_limit: int | None,
    in_use: Collection[Path] = frozenset(),
    keep_every: Collection[int] = (),
) -> None:
    """Delete the run's oldest checkpoints until `save_total_limit` complete ones are left; None keeps all.

    `newest` always stays, and those `in_use` and those whose step one of `keep_every` divides stay. Broken ones do
    not count, and are deleted with the old ones. Folders that the run `mark` did not make stay, and do not count.
    """
    if save_total_limit is None:
        return
    # Sizes are enough here: the newest was just sealed, and reading all others would double the time of a save.
    complete = 1
    for folder in checkpoints_in(output_dir):
        step = _step(folder)
        if folder == newest or step > _step(newest) or not _is_of_run(folder, mark):
            continue
        if _has_all_bytes(folder):
            if any(step % every == 0 for every in keep_every):
                continue
            complete += 1
            if complete <= save_total_limit:
                continue
        if folder not in in_use:
            _remove(folder, mark)


def _is_of_run(folder: Path, mark: str) -> bool:
    """Whether the run `mark` made this checkpoint, and under this name: a user's copy has another."""
    manifest = _manifest_of_run(folder, mark)
    if manifest is None:
        return False
    name = f"checkpoint-{manifest.step}"
    return folder.name in (name, f"{name}.replaced-{mark}")


def _manifest_of_run(folder: Path, mark: str) -> Manifest | None:
    """The manifest of a folder that the run `mark` wrote; None for others."""
    try:
        manifest = read_manifest(folder)
    except ValueError:
        return None
    is_own = manifest.facts.get("run") == mark and not folder.is_symlink()
    return manifest if is_own else None


def checkpoints_in(output_dir: Path) -> list[Path]:
    """Newest first; of two of the same step, the one with the final name first."""
    folders = []
    for path in output_dir.glob("checkpoint-*"):
        if FOLDER_NAME.fullmatch(path.name) and path.is_dir():
            folders.append(path)
    return sorted(folders, key=lambda path: (-_step(path), path.name))


def _step(folder: Path) -> int:
    return int(FOLDER_NAME.fullmatch(folder.name)[1])


def _has_all_bytes(folder: Path) -> bool:
    try:
        files = read_manifest(folder).files
        return all(file_size(folder, name) == entry["size"] for name, entry in files.items())
    except (OSError, ValueError):
        return False


def _temporary(folder: Path, mark: str) -> Path:
    return folder.with_name(f"{folder.name}.tmp-{mark}-{uuid.uuid4().hex[:8]}")


def _remove(folder: Path, mark: str) -> None:
    # Renamed first, so that a killed process leaves no partial checkpoint under a checkpoint's name.
    doomed = _temporary(folder, mark)
    # It may already be deleted.
    with suppress(FileNotFoundError):
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _wrong_field(content: dict, folder_name: str) -> str | None:
    """The first field that `publish` cannot have written."""
    named = FOLDER_NAME.fullmatch(folder_name)
    step, files = content.get("step"), content.get("files")
    if not _is_count(step) or (named and int(named[1]) != step):
        return "step"
    # Another version may have other fields, and the reader refuses it.
    if content.get("format") == FORMAT:
        if not _is_count(content.get("num_processes")) or content["num_processes"] == 0:
            return "num_processes"
        if not isinstance(content.get("only_model"), bool):
            return "only_model"
    if not isinstance(files, dict):
        return "files"
    for name, entry in files.items():
        if not is_inside(name) or name == MANIFEST:
            return f"file {name!r}"
        if not isinstance(entry, dict) or not _is_count(entry.get("size")):
            return f"entry of {name}"
        if not isinstance(entry.get("sha256"), str) or not _SHA256.fullmatch(entry["sha256"]):
            return f"entry of {name}"
    return None


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST
