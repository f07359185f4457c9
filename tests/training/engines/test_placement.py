"""What a process holds, as the card and `parameters_rank<N>.tsv` say it, and the memory that is free for it.

`test_engines.py` adds up the rows of several processes.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.tensor import Shard, distribute_tensor

from hope_hf.common.run_arguments import Arguments
from hope_hf.training.engines.base import Engine
from hope_hf.training.engines.fsdp1 import FSDP1
from hope_hf.training.engines.placement import (
    free_host_memory,
    local_part,
    size_in_bytes,
    write_audit,
)


def test_sharded_tensors_count_with_their_own_part():
    torch.distributed.init_process_group("fake", rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (4,))
        sharded = distribute_tensor(torch.zeros(8, 6), mesh, [Shard(0)], src_data_rank=None)
        assert local_part(sharded).shape == (2, 6)
        assert size_in_bytes([sharded, sharded, torch.zeros(3, dtype=torch.float64)]) == 2 * 6 * 4 + 3 * 8
    finally:
        torch.distributed.destroy_process_group()
    emptied = nn.Parameter(torch.empty(0))
    emptied.ds_tensor = torch.zeros(5, dtype=torch.bfloat16)
    assert size_in_bytes([emptied]) == 10


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


def test_the_machine_counts_where_nothing_limits(system):
    system.write("proc/self/cgroup", "4:memory:/\n0::/user.slice\n")
    system.group(V2, "user.slice", "max", 10**9)
    system.group(V1, "", UNLIMITED, 10**9)
    assert free_host_memory(system.folder) == 64 * 1024
    assert free_host_memory(system.folder / "another") is None


@pytest.mark.parametrize(("version", "line"), [(V2, "0::"), (V1, "9:hugetlb,memory:")], ids=["2", "1"])
def test_the_smallest_limit_counts_and_what_files_hold_is_given_back(system, version, line):
    system.write("proc/self/cgroup", f"12:pids:/other\n{line}/slurm/job_7/step_0\n")
    system.group(version, "slurm/job_7/step_0", UNLIMITED if version is V1 else "max", 9_000)
    system.group(version, "slurm/job_7", 40_000, 9_000)
    system.group(version, "slurm", 400_000, 390_000, cached=1)
    assert free_host_memory(system.folder) == 10_001
    system.group(version, "slurm/job_7", 40_000, 40_001)
    assert free_host_memory(system.folder) == 0


def test_a_container_whose_group_has_its_outer_name(system):
    """Docker with version 1 mounts the container's own group as the root."""
    system.write("proc/self/cgroup", "4:memory:/docker/0123abc\n")
    system.group(V1, "", 50_000, 20_000)
    assert free_host_memory(system.folder) == 30_000


class Model(nn.Module):
    """Tied weights, a frozen one, and a buffer in the state dict and two that are not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight
        self.frozen = nn.Linear(8, 4, bias=False, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("kept", torch.zeros(2, 3, dtype=torch.float64))
        self.first.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("none", None)


def audit(folder, engine: Engine) -> list[list[str]]:
    model = Model()
    engine.adopt(model, torch.optim.SGD(model.first.parameters()))
    write_audit(folder, engine)
    (file,) = folder.glob("parameters_rank*.tsv")
    return [line.split("\t") for line in file.read_text().splitlines()]


@pytest.mark.usefixtures("one_cpu_process")
def test_it_lists_every_parameter_and_buffer(tmp_path):
    accelerator = SimpleNamespace(mixed_precision="no", num_processes=1, process_index=0, is_main_process=True)
    wide = ["float32", "float32"]
    assert audit(tmp_path, Engine(accelerator)) == [
        "name kind shape start end copy dtype compute reduce device trained".split(),
        ["first.weight = last.weight", "parameter", "[8, 8]", "0", "64", "False", *wide, "-", "cpu", "True"],
        ["first.bias", "parameter", "[8]", "0", "8", "False", *wide, "-", "cpu", "True"],
        ["frozen.weight", "parameter", "[4, 8]", "0", "32", "False", "bfloat16", "bfloat16", "-", "cpu", "False"],
        ["kept", "buffer", "[2, 3]", "0", "6", "False", "float64", "float64", "-", "cpu", "False"],
        ["first.count", "buffer", "[]", "0", "1", "False", "int64", "int64", "-", "cpu", "False"],
    ]


@pytest.mark.usefixtures("one_cpu_process")
def test_dtypes_are_those_of_the_launch(tmp_path):
    accelerator = SimpleNamespace(mixed_precision="bf16", num_processes=2, process_index=3, is_main_process=False)
    header, weight, _, frozen, kept, _ = audit(tmp_path, Engine(accelerator))
    columns = [header.index(name) for name in ("compute", "reduce", "copy")]
    autocast = "bfloat16 (autocast)"
    assert [weight[column] for column in columns] == [autocast, "float32", "False"]
    # A frozen parameter has no gradient.
    assert [frozen[column] for column in columns] == [autocast, "-", "False"]
    assert [kept[column] for column in columns] == ["float64", "-", "True"]


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_fsdp_casts_weights_and_reduces_as_its_flag_says(precision):
    plugin = SimpleNamespace(
        sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True, cpu_offload=CPUOffload(False),
        activation_checkpointing=False,
    )  # fmt: skip
    accelerator = SimpleNamespace(
        device=torch.device("cuda"), num_processes=2, mixed_precision=precision,
        state=SimpleNamespace(fsdp_plugin=plugin),
    )  # fmt: skip
    engine = FSDP1(accelerator, Arguments(output_dir="a", fsdp_reduce_dtype="bfloat16"))
    if precision == "no":
        assert (engine.compute_dtype(), engine.buffer_dtype()) == (None, None)
        assert engine.reduce_dtype("any") == torch.float32
    else:
        assert (engine.compute_dtype(), engine.buffer_dtype()) == ("bfloat16", torch.float32)
        assert engine.reduce_dtype("any") == torch.bfloat16
