"""The cache of `datasets`: its folder, texts of local files in it, and links that give files plain names."""

import atexit
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from itertools import filterfalse
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, config

from hope_hf.common.process import warn_once

# Increase it when the same files would be read as other texts.
_VERSION = 4
# Errors of a folder that cannot be written.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)
_SCHEMA = pa.schema([("text", pa.string())])


def cached_texts(files: Iterable[str], what: object, texts: Iterator[pa.Array]) -> Dataset:
    """`texts` as a data set with the one column `text`, from the cache if it has them.

    files, what: the cache key consists of the present state of the files and the repr of `what`.
    """
    path = cache_path(files, what)
    if not path.exists():
        with cache_errors():
            path.parent.mkdir(exist_ok=True)
            _write(path, texts)
    return Dataset.from_file(str(path))


def cache_path(files: Iterable[str], what: object) -> Path:
    """The file of `cached_texts`, which need not exist yet."""
    return writable_cache() / "hope_hf" / f"{_key(files, what)}.arrow"


def cache_for(files: Iterable[str]) -> str:
    """The cache folder for what `datasets` makes of these files in their present state.

    `datasets` itself compares names and times only, so it misses a replaced file that keeps the old time.
    """
    return str(writable_cache() / "hope_hf" / _key(files, "datasets"))


def _key(files: Iterable[str], what: object) -> str:
    states = []
    for file in files:
        states.append((os.path.abspath(file), *_state(os.stat(file))))
    return _hash((_VERSION, states, what))


def _hash(value: object) -> str:
    return blake2b(repr(value).encode("utf-8", errors="surrogateescape"), digest_size=16).hexdigest()


def _state(stat: os.stat_result) -> tuple[int, ...]:
    """Numbers that change with a file's content; a copy may keep size and modification time (`cp -p`, `tar`)."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _write(path: Path, texts: Iterator[pa.Array]) -> None:
    # Written under another name first: no process finds an unfinished file, and several may write the same one.
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        unfinished = Path(scratch) / path.name
        with pa.OSFile(str(unfinished), "wb") as file, pa.ipc.new_stream(file, _SCHEMA) as writer:
            for array in texts:
                writer.write_batch(pa.record_batch([array], schema=_SCHEMA))
        unfinished.replace(path)


def writable_cache() -> Path:
    """The cache's folder; if it cannot be written, a temporary folder that replaces it until the process ends."""
    folder = Path(config.HF_DATASETS_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        config.HF_DATASETS_CACHE = Path(tempfile.mkdtemp(prefix="hope_hf-"))
        atexit.register(shutil.rmtree, config.HF_DATASETS_CACHE, ignore_errors=True)
        warn_once(
            f"The cache {folder} cannot be written ({error.strerror}), {config.HF_DATASETS_CACHE} is used for this "
            "run: name a folder for it in HF_DATASETS_CACHE."
        )
    return Path(config.HF_DATASETS_CACHE)


@contextmanager
def cache_errors():
    """Errors of the disk in the body become a ValueError that names the cache."""
    try:
        yield
    except OSError as error:
        reason = "is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"cannot be written ({error.strerror})"
        raise ValueError(
            f"The cache {config.HF_DATASETS_CACHE} {reason}: free some space, or name another folder in "
            "HF_DATASETS_CACHE."
        ) from error


_SPECIAL = re.compile(r"[*?\[\]]|::|:/")


def plain_name(name: str) -> str:
    """`name`, or another name of the same file or folder, in which no character is special."""
    path = os.path.abspath(name)
    is_file = os.path.isfile(path)
    folder = os.path.dirname(path) if is_file else path
    files = [path] if is_file else files_under(path)
    if not any(map(_SPECIAL.search, [path, *files])):
        return name
    names = {file: os.path.relpath(file, folder) for file in files}
    links = {name: file for file, name in names.items() if not _SPECIAL.search(name)}
    for file, name in names.items():
        replacement = "_"
        while links.setdefault(_SPECIAL.sub(replacement, name), file) != file:
            # Another file has this name.
            replacement += "_"
    link_folder = writable_cache() / "hope_hf" / f"links-{_hash(sorted(links.items()))}"
    if not link_folder.exists():
        with cache_errors():
            link_folder.parent.mkdir(exist_ok=True)
            _link(links, link_folder)
    # A file has one link; a folder has a folder of links.
    return str(link_folder / next(iter(links))) if is_file else str(link_folder)


def files_under(folder: str) -> list[str]:
    """The paths of all files in a folder, sorted; hidden files are not part of a data set."""
    paths = []
    walked = set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(parent)
        if real in walked:
            # A link that leads back.
            folders.clear()
            continue
        walked.add(real)
        folders[:] = filterfalse(_is_hidden, folders)
        for name in filterfalse(_is_hidden, names):
            paths.append(os.path.join(parent, name))
    return sorted(paths)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _link(links: dict[str, str], folder: Path) -> None:
    # Made under another name first, so that no other process finds an incomplete folder.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        unfinished = Path(scratch, folder.name)
        for link, file in links.items():
            path = unfinished / link
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(file)
        try:
            unfinished.rename(folder)
        except FileExistsError:
            # Another process was faster.
            pass
