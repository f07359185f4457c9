"""Free memory of the machine, or of the part of it that a container or a job may use."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def free_host_memory(system: Path = Path("/")) -> int | None:
    """Bytes that this process may still take; None if the system does not report them.

    Args:
        system: the folder that has `proc` and `sys`.
    """
    rooms = [*_machine(system), *_cgroups(system)]
    return max(0, min(rooms)) if rooms else None


def _machine(system: Path) -> Iterator[int]:
    for line in _lines(system / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _cgroups(system: Path) -> Iterator[int]:
    """Of each group with a limit, from the process's own to the outermost that is visible: all of them count."""
    for line in _lines(system / "proc/self/cgroup"):
        number, controllers, own = line.split(":", 2)
        if number == "0":
            root, limit, used, total = "sys/fs/cgroup", "memory.max", "memory.current", ""
        elif "memory" in controllers.split(","):
            # Version 1; its fields with the subgroups' share begin with total.
            root, limit, used = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            total = "total_"
        else:
            continue
        # In a container the own group may be named from outside, and is then the root that is mounted here.
        path = PurePosixPath(own.lstrip("/"))
        for group in (path, *path.parents):
            folder = system / root / group
            most, held = _lines(folder / limit), _lines(folder / used)
            if not held or most in ([], ["max"]):
                continue
            # As MemAvailable does: the kernel drops cached pages of files before it refuses memory.
            stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
            cached = sum(int(stat.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield int(most[0]) - int(held[0]) + cached


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
