"""Local files by their names: found, checked, and counted.

Files are opened by their exact names: nothing in a name is a pattern or a URL where a file of that name exists.
"""

import glob
import os
from collections.abc import Iterator

from hope_hf.common.flags import as_list
from hope_hf.common.process import warn_once

from .file_kinds import ARCHIVES, CODECS, KINDS, kind_of, unpacked_ending
from .saved_folder import is_saved, saved_files


def find_files(names: str | list[str], flag: str, split: str = "train") -> list[str]:
    """The files that paths and glob patterns name, each once, the matches of a pattern sorted and all of one kind.

    A link to a file is that file: it is read once, by the name that comes first.

    A name that exists is no pattern, whatever characters it has; nor are existing folders at its beginning. A folder
    must come from `Dataset.save_to_disk`; `split` is read if it has splits. Files without rows among others are left
    out, with a warning. Raises ValueError naming `flag` and file.
    """
    # Not at the top: `named_files` needs no readers.
    from .empty_files import has_no_rows

    paths = named_files(names, flag, split)
    filled = []
    empty = []
    for path in paths:
        if has_no_rows(path):
            empty.append(path)
        else:
            filled.append(path)
    if not filled:
        what = "holds no rows with text" if os.path.getsize(empty[0]) else "is empty"
        raise ValueError(f"{flag} {empty[0]} {what}: give a file with text.")
    if empty:
        more = f" and {len(empty) - 1:,} more are" if len(empty) > 1 else " is"
        read = f"{len(filled):,} of {len(paths):,} files are read"
        warn_once(f"{flag}: {empty[0]}{more} empty and left out, {read}.")
    return filled


def named_files(names: str | list[str], flag: str, split: str = "train") -> list[str]:
    """The files of `find_files`, also those without rows: none is opened."""
    names_of_files = {}
    again = []
    for name in as_list(names):
        for path in _expand(name, flag, split):
            file = os.path.realpath(path)
            first = names_of_files.setdefault(file, path)
            if os.path.abspath(first) != os.path.abspath(path):
                again.append(f"{path} is the file {first} by another name")
    if again:
        more = f" (and {len(again) - 1:,} more such names)" if len(again) > 1 else ""
        warn_once(f"{flag}: {again[0]}, and is read once{more}.")
    paths = list(names_of_files.values())
    _warn_of_packed_copies(paths, flag)
    return paths


def _warn_of_packed_copies(paths: list[str], flag: str) -> None:
    unpacked = set(paths)
    for path in paths:
        stem, ending = os.path.splitext(path)
        if ending.lower() in CODECS and stem in unpacked:
            warn_once(f"{flag}: {stem} and {path} are both read: leave one out if they hold the same text.")
            return


def size_of_files(names: str | list[str], flag: str) -> int:
    """Bytes of the files that `find_files` finds, as they lie on the disk."""
    return sum(map(os.path.getsize, find_files(names, flag)))


def _expand(name: str, flag: str, split: str) -> list[str]:
    """The files of one path or pattern."""
    if os.path.isdir(name):
        if not is_saved(name):
            example = os.path.join(name, "*.txt")
            raise ValueError(f"{flag} {name} is a folder: name its files, for example {example}")
        paths = saved_files(name, f"{flag} {name}", split)
    elif os.path.exists(name):
        paths = [name]
    else:
        paths = sorted(filter(os.path.isfile, _glob(name)))
    if not paths:
        kind = "matches no file" if glob.has_magic(name) else "does not exist"
        raise ValueError(f"{flag} {name} {kind}: check the path.")
    for path in paths:
        _check(path, flag)
    if len(set(map(kind_of, paths))) > 1:
        raise ValueError(f"{flag} {name} matches files of several kinds: name those of one kind, such as '*.txt'.")
    return paths


def _glob(pattern: str) -> Iterator[str]:
    """The matches of a pattern; characters in the names of existing folders are not meant as one."""
    folder = os.path.dirname(pattern)
    while folder and not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    return glob.iglob(glob.escape(folder) + pattern[len(folder) :], recursive=True)


def _check(path: str, flag: str) -> None:
    if unpacked_ending(path) in ARCHIVES:
        raise ValueError(f"{flag} {path} is compressed: unpack it, and name the files that were in it.")
    if kind_of(path) is None:
        kinds = ", ".join(KINDS)
        raise ValueError(
            f"{flag} {path} is none of {kinds}, nor one of these as {', '.join(CODECS)}: convert or rename it."
        )
    if not os.access(path, os.R_OK):
        raise ValueError(f"{flag} {path} cannot be read: check its permissions.")
