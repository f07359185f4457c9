"""Names of files that others wrote, and the rights of those that libraries write."""

import shutil
from contextlib import suppress
from pathlib import Path, PurePosixPath


def is_inside(name: object) -> bool:
    """Whether a file's name, read from another file, is a plain relative path that stays in its folder.

    Neither absolute nor with `..` or an empty part, and printable: it is shown to the user.
    """
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return name == path.as_posix() != "." and not path.is_absolute() and ".." not in path.parts


def copy_rights(file: Path, to: Path) -> None:
    """Let those read and write `to` who may do so with `file`.

    safetensors gives its files to their owner alone, whatever the umask says.
    """
    # Some disks have no such rights.
    with suppress(OSError):
        shutil.copymode(file, to)


def share_weights(folder: Path) -> None:
    """Give the weights that `save_pretrained` wrote to `folder` the rights of its other files."""
    for file in folder.glob("model*.safetensors"):
        copy_rights(folder / "config.json", file)
