"""Rules against the singular value decomposition, torch's own and the paper; rules on parameters sharded by rows."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hope_hf.optim import RULES, LevelClock, newton_schulz, own_part
from hope_hf.optim.rules import by_whole_matrices

OF_MATRICES = [name for name, rule in RULES.items() if rule.needs_matrices]


def matrices(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (2, 3, 24, 8)])
def test_newton_schulz_keeps_the_directions_and_levels_the_singular_values(shape):
    gradient = matrices(*shape)
    u, _, vh = torch.linalg.svd(gradient, full_matrices=False)
    in_basis = u.mT @ newton_schulz(gradient) @ vh.mT
    values = in_basis.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6 and values.max() < 1.25
    assert (in_basis - torch.diag_embed(values)).abs().max() < 1e-4


@pytest.mark.parametrize("shape", [(8, 24), (24, 8)])
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


def clock_of(name, parameter, lr=1.0, **settings):
    group = {"params": [parameter], "optimizer": name, "lr": lr, "weight_decay": 0.0}
    return LevelClock([group | RULES[name].settings((0.9, 0.95), 1e-15) | settings])


@pytest.mark.parametrize("name", OF_MATRICES)
@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (3, 128, 32), (200, 16, 32)])
def test_an_update_has_the_size_of_an_adamw_update(shape, name):
    parameter = torch.nn.Parameter(torch.zeros(shape))
    optimizer = clock_of(name, parameter)
    parameter.grad = matrices(*shape)
    optimizer.step()
    assert parameter.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.2)


def gradients(count, *shape):
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_m3_equals_algorithm_1():
    """Its sums, as printed: `M += beta g`, without decay and without a size of the update."""
    (beta1, beta2, beta3), alpha, period, eta, eps = (0.9, 0.8, 0.7), 0.5, 4, 0.1, 1e-3
    parameter = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
    sums = {"fast": (1, beta1), "square": (1, beta2), "slow": (1, beta3)}
    optimizer = clock_of("m3", parameter, eta, slow_weight=alpha, period=period, update_rms=None, eps=eps, **sums)
    theta, m1, m2, v = (torch.zeros(3, 5, dtype=torch.float64) for _ in range(4))
    all_gradients = gradients(12, 3, 5)
    for k in range(3):
        m2 = m2 + beta3 * all_gradients[max(k - 1, 0) * period : k * period].sum(0)
        o2 = newton_schulz(m2)
        for g in all_gradients[k * period : (k + 1) * period]:
            m1, v = m1 + beta1 * g, v + beta2 * g**2
            theta = theta - eta * (newton_schulz(m1) + alpha * o2) / (v.sqrt() + eps)
            parameter.grad = g.clone()
            optimizer.step()
            torch.testing.assert_close(parameter.detach(), theta, rtol=0, atol=1e-12)


def test_delta_momentum_equals_equations_49_and_52():
    """For a unit gradient u in place of the gradient in the term that forgets."""
    alpha, eta = 0.95, 0.1
    parameter = torch.nn.Parameter(torch.zeros(3, 5, dtype=torch.float64))
    optimizer = clock_of("delta_momentum", parameter, eta)
    w, m = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, 5, dtype=torch.float64)
    for g in gradients(6, 3, 5):
        u = g / g.norm()
        m = m @ (alpha * torch.eye(5, dtype=torch.float64) - u.T @ u) - g
        w = w + eta * 0.2 * 5**0.5 * newton_schulz(m)
        parameter.grad = g.clone()
        optimizer.step()
        torch.testing.assert_close(parameter.detach(), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_names_the_tensors_of_its_state(name):
    parameter = torch.nn.Parameter(torch.zeros(2, 4, 8))
    optimizer = clock_of(name, parameter)
    parameter.grad = torch.ones(2, 4, 8)
    optimizer.step()
    state = optimizer.state[parameter]
    assert set(state) == {"step", *RULES[name].state_names}
    assert all(state[tensor].shape == parameter.shape for tensor in RULES[name].state_names)


@pytest.mark.parametrize("name", OF_MATRICES)
def test_a_step_reads_nothing_from_the_device(name):
    """A meta tensor has no value, so that reading one fails where a GPU would be waited for."""
    parameter = torch.nn.Parameter(torch.zeros(3, 5, device="meta"))
    optimizer = clock_of(name, parameter, 0.1)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    saved = optimizer.state_dict()
    # A state of before has the count beside the parameter.
    saved["state"][0]["step"] = torch.tensor(16.0)
    optimizer.load_state_dict(saved)
    optimizer.step()
    step = optimizer.state[parameter]["step"]
    assert (step.device.type, step.item()) == ("cpu", 17)


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
    assert torch.equal(by_whole_matrices(lambda matrices: 2 * matrices, stack, part), 2 * part)


def test_a_matrix_is_whole_for_the_function_and_cut_afterwards(two_ranks):
    matrix = distribute_tensor(torch.zeros(5, 2), two_ranks, [Shard(0)], src_data_rank=None)
    seen = []

    def function(whole):
        seen.append(whole.shape)
        return torch.arange(10.0).view(5, 2)

    # Of five rows the first process has three.
    assert by_whole_matrices(function, matrix, own_part(matrix)).tolist() == [[6, 7], [8, 9]]
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


def test_dtypes():
    gradient = matrices(8, 12)
    exact = newton_schulz(gradient.double())
    assert exact.dtype == torch.float64 and (newton_schulz(gradient) - exact).abs().max() < 1e-5
    # Only the input's rounding, not that of fifteen bfloat16 products.
    low = newton_schulz(gradient.bfloat16())
    assert torch.equal(low, newton_schulz(gradient.bfloat16().float()).bfloat16())
    assert not newton_schulz(torch.zeros(4, 4)).any()
    # A large model's gradients are small.
    torch.testing.assert_close(newton_schulz(gradient * 1e-6, dtype=torch.bfloat16), exact.float(), rtol=0, atol=0.1)
