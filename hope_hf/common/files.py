"""Small files: read and replaced whole; names read from other files; permissions of files that libraries write."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import IO

from safetensors import SafetensorError

# Names in the folder of a run. A checkpoint that is still being written has another name.
RUN_FILE = "run.json"
TEXT_FILES = "text"
"""The key of a run's identity for the files of its text."""
PROCESSES = "processes"
"""Folder of the files that every process writes for itself."""
CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")


def is_inside(name: object) -> bool:
    """Whether a file's name, read from another file, is a plain relative path that stays in its folder.

    It is not absolute, has no `..` or empty part, and is printable, since it is shown to the user.
    """
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return name == path.as_posix() != "." and not path.is_absolute() and ".." not in path.parts


def at_home(path: str) -> str:
    """A path with the user's own folder in place of `~` at its beginning; any other text as it is.

    Shells leave the tilde of `--flag=~/x`, and recipes and quoted words have no shell.
    """
    return os.path.expanduser(path)


SMALL = 64 << 20
"""Bytes of the largest recipe, manifest, report or other file that is read whole."""
LARGEST_METRICS = 1 << 36
"""Bytes of metrics.jsonl; a row has a few thousand."""


def read_small(path: str | Path, most: int = SMALL) -> str:
    """The text of a small file in UTF-8, such as a recipe, a manifest or a report, without a byte order mark.

    It is opened without waiting for a writer, since a named pipe in its place would block for ever.

    Raises:
        OSError: it is missing or cannot be read.
        ValueError: it is not a regular file, has more than `most` bytes, or is not UTF-8. The message is the reason
            alone: the caller names the file and the fix.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        # In parts, since Python allocates all bytes asked for. One byte above the limit reveals a longer file.
        content = bytearray()
        while part := file.read(min(most + 1 - len(content), 1 << 20)):
            content += part
    if len(content) > most:
        raise ValueError(f"it has more than {most:,} bytes")
    return content.decode("utf-8-sig")


def read_object(path: Path, named: str, fix: str) -> dict:
    """The JSON object of a small file. Raises ValueError that begins with `named` and names the file and the fix."""
    try:
        value = json.loads(read_small(path))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
    # RecursionError: thousands of nested brackets.
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{named} {path} cannot be read, {fix}: {reason}.") from None
    return value


def copy_rights(file: Path, to: Path) -> None:
    """Give `to` the permissions of `file`.

    safetensors writes files that only their owner can read, whatever the umask is.
    """
    # Some file systems have no permissions.
    with suppress(OSError):
        shutil.copymode(file, to)


def unfinished(file: Path) -> Path:
    """A random name beside a file for its replacement: open it with mode x.

    It is then never a file or a link that another program put there.
    """
    return file.with_name(f"{file.name}.tmp-{secrets.token_hex(8)}")


def is_unfinished(name: str, of: str) -> bool:
    """Whether a file's name is one that `unfinished` gave for files whose names match the regular expression `of`."""
    return re.fullmatch(rf"(?:{of})\.tmp-[0-9a-f]{{16}}", name) is not None


def replace_text(file: Path, text: str) -> None:
    """Write a text file in UTF-8, so that readers find the old text or the new one, and never a part.

    This holds after a power failure, too. A link in its place is replaced, not followed.
    """
    scratch = unfinished(file)
    try:
        with scratch.open("x", encoding="utf-8") as opened:
            opened.write(text)
            flush_to_disk(opened)
        scratch.replace(file)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


@contextmanager
def disk_errors() -> Iterator[None]:
    """Raises the OSError that an error of safetensors or tokenizers has in its text alone."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None or isinstance(error, OSError):
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


@contextmanager
def write_errors(named: str) -> Iterator[None]:
    """Inside, an OSError becomes a ValueError: `named`, a flag and its path, cannot be written."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{named} cannot be written: {error.strerror}.") from None


def require_new(folder: Path, flag: str) -> None:
    """Raise ValueError that names the flag unless the folder is empty or does not exist."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{flag} {folder} exists and is not an empty folder: name a new one.")


@contextmanager
def new_folder(out: Path, flag: str) -> Iterator[Path]:
    """Gives a folder that is renamed to `out` at the end; after an error nothing is left of it.

    Raises:
        ValueError: it cannot be written, one sentence that names the flag.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            folder = Path(scratch) / out.name
            folder.mkdir()
            yield folder
            folder.rename(out)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{flag} {out} cannot be written: {reason}.") from error


def flush_to_disk(file: IO) -> None:
    """Return once everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


# Errors of file systems that cannot flush a folder: CIFS, FUSE, and (EIO) the drives of Windows under WSL.
_NO_FLUSHING = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO)


def flush_folder(folder: Path) -> None:
    """Return once the names in a folder are on the disk; at once on a file system that cannot flush folders."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSHING:
            raise
    finally:
        os.close(descriptor)


def free_disk(folder: Path) -> int | None:
    """Free bytes on the disk of a folder; None if its file system does not say."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    # Drives of FUSE may answer 0 bytes free of 0.
    return usage.free if usage.total else None


def copy_rights_of_folder(file: Path) -> None:
    """Give a file the permissions that match those of its folder."""
    with suppress(OSError):
        file.chmod(file.parent.stat().st_mode & 0o666)


def share_weights(folder: Path) -> None:
    """Give the weights that `save_pretrained` wrote to `folder` the permissions of its other files."""
    for file in folder.glob("*model*.safetensors"):
        copy_rights(next(folder.glob("*config.json")), file)
