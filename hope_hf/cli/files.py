"""Names of files that others wrote, and the rights of those that libraries write."""

import shutil
from pathlib import Path, PurePosixPath


def is_inside(name: object) -> bool:
    """Whether a file's name, read from another file, is a plain relative path that stays in its folder.

    Neither absolute nor with `..` or an empty part, and printable: it is shown to the user.
    """
    if not isinstance(name, str) or not name.isprintable():
        return False
    path = PurePosixPath(name)
    return name == path.as_posix() != "." and not path.is_absolute() and ".." not in path.parts


def share_weights(folder: Path) -> None:
    """Let those read the weights in `folder` who may read its config.json.

    safetensors gives its files to their owner alone, whatever the umask says.
    """
    for file in folder.glob("model*.safetensors"):
        shutil.copymode(folder / "config.json", file)
