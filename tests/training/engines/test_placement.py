"""What a process holds, as the banner reports it."""

import re

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hope_hf.training.engines.placement import free_memory, local_part, rank_lines, size_in_bytes


def model() -> nn.Module:
    built = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16))
    built[1].weight.requires_grad_(False)
    return built


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


def test_the_line_of_a_process_names_place_memory_and_dtypes(one_cpu_process):
    (line,) = rank_lines(Accelerator(cpu=True), model())
    assert line.startswith("0 of 1 (local 0 on ")
    assert line.endswith("GiB free, holds 16 bfloat16, 36 float32")
    assert float(re.search(r"cpu, ([0-9.]+) GiB", line)[1]) > 0


def test_what_the_system_does_not_tell_is_not_invented(monkeypatch):
    def fails(*arguments, **keywords):
        raise FileNotFoundError

    assert free_memory(torch.device("cpu")) > 2**20
    monkeypatch.setattr("pathlib.Path.read_text", fails)
    assert free_memory(torch.device("cpu")) is None
