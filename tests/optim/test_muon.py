"""Muon against the singular value decomposition it approximates, and against torch's own."""

import pytest
import torch

from hope_hf.optim import LevelClock, newton_schulz


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
