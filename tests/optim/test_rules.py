"""Muon against the singular value decomposition and torch's own; rules on parameters that are sharded by rows."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hope_hf.optim import RULES, LevelClock, newton_schulz, own_part
from hope_hf.optim.rules import by_whole_matrices


def orthogonalised(matrix):
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


def matrices(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8), (3, 8, 24), (2, 3, 24, 8)])
def test_newton_schulz_keeps_the_directions_and_levels_the_singular_values(shape):
    gradient = matrices(*shape)
    result = newton_schulz(gradient)
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    in_basis = u.mT @ result @ vh.mT
    values = in_basis.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6 and values.max() < 1.25
    assert (in_basis - torch.diag_embed(values)).abs().max() < 1e-4
    assert (result - orthogonalised(gradient)).norm() < 0.35 * result.norm()


def test_stacked_matrices_are_orthogonalised_one_by_one():
    """A head whose gradient is a thousand times smaller gets as large an update as its neighbours."""
    gradient = matrices(4, 8, 12) * torch.tensor([1.0, 1e-3, 10.0, 1.0])[:, None, None]
    together = newton_schulz(gradient)
    for head in range(4):
        torch.testing.assert_close(together[head], newton_schulz(gradient[head]), rtol=0, atol=1e-5)


def test_dtypes():
    gradient = matrices(8, 12)
    exact = newton_schulz(gradient.double())
    assert exact.dtype == torch.float64
    assert (newton_schulz(gradient) - exact).abs().max() < 1e-5
    low = newton_schulz(gradient.bfloat16())
    assert low.dtype == torch.bfloat16
    # Only the input's rounding, not that of fifteen bfloat16 products.
    torch.testing.assert_close(low, newton_schulz(gradient.bfloat16().float()).bfloat16(), rtol=0, atol=0)
    assert (newton_schulz(gradient, dtype=torch.bfloat16) - exact).abs().max() > 1e-3
    assert newton_schulz(torch.zeros(4, 4)).abs().max() == 0
    # A large model's gradients are small.
    torch.testing.assert_close(newton_schulz(gradient * 1e-6, dtype=torch.bfloat16), exact.float(), rtol=0, atol=0.1)


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_steps_equal_torch_muon(shape):
    """torch computes only in bfloat16, whose rounding is the tolerance."""
    start = matrices(*shape)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    group = {"params": [ours], "optimizer": "muon", "lr": 0.05, "weight_decay": 0.1, "momentum": 0.95}
    optimizer = LevelClock([group])
    peer = torch.optim.Muon([theirs], lr=0.05, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for step in range(5):
        ours.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        theirs.grad = ours.grad.clone()
        optimizer.step()
        peer.step()
    moved = (ours - start).norm()
    assert (ours - theirs).norm() < 0.02 * moved


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (3, 128, 32), (200, 16, 32)])
def test_an_update_has_the_size_of_an_adamw_update(shape):
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = LevelClock(
        [{"params": [parameter], "optimizer": "muon", "lr": 1.0, "weight_decay": 0.0, "momentum": 0.95}]
    )
    parameter.grad = matrices(*shape)
    optimizer.step()
    assert parameter.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_states_the_bytes_of_its_state(name):
    parameter = torch.zeros(2, 4, 8)
    tensors = RULES[name].initial_state(parameter).values()
    assert sum(tensor.nbytes for tensor in tensors) == RULES[name].state_bytes * parameter.numel()


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
