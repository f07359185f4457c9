"""Names for `datasets.load_dataset`, which takes characters of names for patterns and URLs.

A file or folder with such a name is handed over by links with plain names, kept beside the cache.
"""

import os
import re
import tempfile
from hashlib import blake2b
from pathlib import Path

from .cache import cache_errors, writable_cache

_SPECIAL = re.compile(r"[*?\[\]]|::|:/")


def plain_name(name: str) -> str:
    """`name`, or another name of the same file or folder, in which no character is special."""
    path = os.path.abspath(name)
    files = [path] if os.path.isfile(path) else files_under(path)
    if not any(map(_SPECIAL.search, [path, *files])):
        return name
    folder = os.path.dirname(path) if os.path.isfile(path) else path
    links = {_SPECIAL.sub("_", os.path.relpath(file, folder)): file for file in files}
    key = blake2b(repr(sorted(links.items())).encode("utf-8", errors="surrogateescape"), digest_size=16).hexdigest()
    there = writable_cache() / "hope_hf" / f"links-{key}"
    if not there.exists():
        with cache_errors():
            there.parent.mkdir(exist_ok=True)
            _link(links, there)
    # One link stands for a file, as it does for itself.
    return str(there / next(iter(links))) if os.path.isfile(path) else str(there)


def files_under(folder: str) -> list[str]:
    """The paths of all files in a folder, sorted; hidden ones are none of a data set's."""
    found = []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [os.path.join(parent, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _link(links: dict[str, str], there: Path) -> None:
    # Under another name first, so that no other process finds a part.
    with tempfile.TemporaryDirectory(dir=there.parent) as scratch:
        for link, file in links.items():
            place = Path(scratch, there.name, link)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(file)
        try:
            Path(scratch, there.name).rename(there)
        except FileExistsError:
            # Another process was faster.
            pass
