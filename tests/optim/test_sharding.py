"""Updates of parameters that are sharded over several processes."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hope_hf.optim import LevelClock
from hope_hf.optim.sharding import by_whole_matrices, own_part


@pytest.fixture
def two_ranks():
    """The mesh of two processes, as on the second one; nothing is sent."""
    torch.distributed.init_process_group("fake", rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    torch.distributed.destroy_process_group()


def test_a_stack_of_matrices_is_cut_between_them(two_ranks):
    stack = distribute_tensor(torch.arange(36.0).view(4, 3, 3), two_ranks, [Shard(0)], src_data_rank=None)
    part = own_part(stack)
    assert part.shape == (2, 3, 3)
    assert torch.equal(by_whole_matrices(lambda matrices: 2 * matrices, part, stack), 2 * part)


def test_a_matrix_is_whole_for_the_function_and_cut_afterwards(two_ranks):
    matrix = distribute_tensor(torch.zeros(5, 2), two_ranks, [Shard(0)], src_data_rank=None)
    seen = []

    def function(whole):
        seen.append(whole.shape)
        return torch.arange(10.0).view(5, 2)

    # Of five rows the first process has three.
    assert by_whole_matrices(function, own_part(matrix), matrix).tolist() == [[6, 7], [8, 9]]
    assert seen == [(5, 2)]


def test_the_clock_of_an_empty_part_goes_on():
    """If another process holds all of a parameter, this one has no gradient."""
    full, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0))
    common = {"optimizer": "adamw", "lr": 0.1, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-8}
    clocks = [{"params": [full], "level": 0}, {"params": [empty], "level": 1, "period_steps": 2}]
    optimizer = LevelClock([common | clock for clock in clocks])
    for _ in range(5):
        full.grad = torch.ones(3)
        optimizer.step()
    report = optimizer.level_report()
    assert report[0]["updates"] == 5
    assert (report[1]["updates"], report[1]["steps_since_update"]) == (2, 1)
