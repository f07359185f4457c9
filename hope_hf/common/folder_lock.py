"""One writer per folder: a lock that the operating system releases when its process ends, also by kill -9.

POSIX only (`flock`).
"""

import errno
import fcntl
import os
import warnings
from pathlib import Path

LOCK_FILE = "run.lock"
# Errors of disks without locks, for example Lustre mounted without them.
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}
_held: set[int] = set()


class FolderLock:
    """Locks `folder` against all other processes from `acquire` to `release` or to the end of this process."""

    def __init__(self, folder: str | Path, flag: str = "--output_dir"):
        """`flag` has named the folder."""
        self._folder = Path(folder)
        self._named = f"{flag} {folder}"
        self._file = self._folder / LOCK_FILE
        self._descriptor: int | None = None
        self._made: list[Path] = []

    def acquire(self):
        """Make the folder if there is none, and lock it.

        Raises ValueError if another process holds it or nothing can be written there; warns if the disk has no
        locks.
        """
        try:
            self._acquire()
        except BlockingIOError:
            raise ValueError(
                f"{self._named} is in use, another process writes to it: wait for it or choose another folder."
            ) from None
        except OSError as error:
            raise ValueError(f"{self._named} cannot be written: {error.strerror}.") from None

    def release(self):
        """Unlock the folder; delete it if this lock made it and nothing was written there."""
        if self._descriptor not in _held:
            return
        # Removed while still locked: a process that opens it later gets a new file, and one that opened it before will
        # notice. If the folder was deleted meanwhile, the file there now is another run's.
        if self._is_the_file(self._descriptor):
            self._file.unlink(missing_ok=True)
        _held.remove(self._descriptor)
        os.close(self._descriptor)
        self._descriptor = None
        try:
            for folder in self._made:
                folder.rmdir()
        except OSError:
            # The folder holds a run now.
            pass

    def _acquire(self):
        missing = [folder for folder in (self._folder, *self._folder.parents) if not folder.exists()]
        while True:
            self._folder.mkdir(parents=True, exist_ok=True)
            try:
                # Started programs do not inherit it; forked processes close it (below).
                descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            except FileNotFoundError:
                # Another process released its lock and deleted the folder.
                continue
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_the_file(descriptor):
                    break
                os.close(descriptor)
            except OSError as error:
                if error.errno in _NO_LOCKS:
                    warnings.warn(
                        f"{self._named} lies on a disk without locks ({error.strerror}): a second "
                        "process could write to it, too.",
                        stacklevel=2,
                    )
                    break
                os.close(descriptor)
                raise
        _held.add(descriptor)
        self._descriptor, self._made = descriptor, missing

    def _is_the_file(self, descriptor: int) -> bool:
        """False if the file was removed since it was opened: that lock excludes no other process."""
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._file))
        except FileNotFoundError:
            return False


def is_locked(folder: str | Path) -> bool:
    """Whether a process holds the lock of `folder`; writes nothing."""
    try:
        with (Path(folder) / LOCK_FILE).open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # There is no such file, or the disk has no locks.
        return False
    return False


def _let_go():
    """A forked child shares its parent's lock, and would keep it after the parent is killed."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)
