"""Free memory of a machine, of a container on it, and of a job: the smallest counts."""

from pathlib import Path

import pytest

from hope_hf.training.engines.host import free_host_memory

V2 = "sys/fs/cgroup", "memory.max", "memory.current", "{kind}_file"
V1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_{kind}_file"
# Of version 1, where nothing limits.
UNLIMITED = "9223372036854771712"


class System:
    """A folder with the files of a machine that has `available` bytes."""

    def __init__(self, folder: Path, available: int):
        self.folder = folder
        self.write("proc/meminfo", f"MemTotal: 999 kB\nMemAvailable:    {available // 1024} kB\n")

    def write(self, file: str, text: str):
        (self.folder / file).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / file).write_text(text)

    def group(self, version: tuple, path: str, limit: object, used: int, cached: int = 0):
        root, limit_file, used_file, field = version
        self.write(f"{root}/{path}/{limit_file}", f"{limit}\n")
        self.write(f"{root}/{path}/{used_file}", f"{used}\n")
        kinds = {"active": cached // 2, "inactive": cached - cached // 2, "inactive_anon": 77}
        stat = "".join(f"{field.format(kind=kind)} {size}\n" for kind, size in kinds.items())
        self.write(f"{root}/{path}/memory.stat", f"anon 55\n{stat}")


@pytest.fixture
def system(tmp_path) -> System:
    return System(tmp_path, 64 * 1024)


def test_without_a_limit_the_machine_counts(system):
    assert free_host_memory(system.folder) == 64 * 1024
    system.write("proc/self/cgroup", "4:memory:/\n1:cpu:/\n0::/user.slice\n")
    assert free_host_memory(system.folder) == 64 * 1024
    system.group(V2, "user.slice", "max", 10**9)
    system.group(V1, "", UNLIMITED, 10**9)
    assert free_host_memory(system.folder) == 64 * 1024


@pytest.mark.parametrize(("version", "line"), [(V2, "0::"), (V1, "9:hugetlb,memory:")], ids=["2", "1"])
def test_the_limit_of_a_container_counts_where_it_is_smaller(system, version, line):
    system.write("proc/self/cgroup", f"12:pids:/other\n{line}/\n")
    system.group(version, "", 50_000, 20_000)
    assert free_host_memory(system.folder) == 30_000
    # What files hold in the cache is given back.
    system.group(version, "", 50_000, 20_000, cached=7_001)
    assert free_host_memory(system.folder) == 37_001
    system.group(version, "", 500_000, 20_000)
    assert free_host_memory(system.folder) == 64 * 1024
    system.group(version, "", 50_000, 50_001)
    assert free_host_memory(system.folder) == 0


@pytest.mark.parametrize(("version", "line"), [(V2, "0::"), (V1, "4:memory:")], ids=["2", "1"])
def test_the_limit_of_a_job_counts_for_its_steps(system, version, line):
    system.write("proc/self/cgroup", f"{line}/slurm/job_7/step_0\n")
    system.group(version, "slurm/job_7/step_0", UNLIMITED if version is V1 else "max", 9_000)
    system.group(version, "slurm/job_7", 40_000, 9_000)
    system.group(version, "slurm", 400_000, 390_000)
    assert free_host_memory(system.folder) == 10_000


def test_a_container_whose_group_has_its_outer_name(system):
    """Docker with version 1 mounts the container's own group as the root."""
    system.write("proc/self/cgroup", "4:memory:/docker/0123abc\n")
    system.group(V1, "", 50_000, 20_000)
    assert free_host_memory(system.folder) == 30_000


def test_a_limit_is_enough_and_nothing_is_not_invented(system, tmp_path):
    (system.folder / "proc/meminfo").unlink()
    assert free_host_memory(system.folder) is None
    system.write("proc/self/cgroup", "0::/\n")
    system.group(V2, "", 50_000, 20_000)
    assert free_host_memory(system.folder) == 30_000
