"""The clock against hand-written loops, and all that a checkpoint must keep."""

import copy
import warnings

import pytest
import torch
from transformers import get_scheduler

from hope_hf.optim import LevelClock, build_optimizer, warn_short_levels


def train(model, optimizer, set_gradients, steps):
    for step in steps:
        set_gradients(model, step)
        optimizer.step()


def assert_same_weights(model, other):
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a, b), name


def adamw_group(parameters, **more):
    return {
        "params": parameters,
        "optimizer": "adamw",
        "lr": 1e-2,
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.1,
        **more,
    }


def test_period_one_is_torch_adamw_bit_for_bit(leveled_model, set_gradients):
    ours, theirs = leveled_model(), leveled_model()
    peer = torch.optim.AdamW(theirs.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    optimizer = LevelClock([adamw_group(list(ours.parameters()))])
    train(ours, optimizer, set_gradients, range(5))
    train(theirs, peer, set_gradients, range(5))
    assert_same_weights(ours, theirs)
    # No state beyond torch's: a fast level has no cost from the slow ones.
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert optimizer.state[parameter].keys() == peer.state[other].keys()


class PeerGroup:
    """torch's AdamW for one group, given the mean gradient of its period and stepped at the period's end."""

    def __init__(self, group, parameters):
        settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        self.optimizer = torch.optim.AdamW(parameters, **settings, fused=True)
        self.parameters = parameters
        self.period = group["period_steps"]
        self.sums = [torch.zeros_like(parameter) for parameter in parameters]

    def step(self, number):
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            total += parameter.grad
        if number % self.period:
            return
        for parameter, total in zip(self.parameters, self.sums, strict=True):
            parameter.grad = total / self.period
            total.zero_()
        self.optimizer.step()


def test_levels_equal_a_hand_written_loop(leveled_model, set_gradients, settings):
    ours, theirs = leveled_model(), leveled_model()
    optimizer = build_optimizer(ours, "adamw", **settings)
    names = {parameter: name for name, parameter in ours.named_parameters()}
    peers = []
    for group in optimizer.param_groups:
        parameters = [theirs.get_parameter(names[parameter]) for parameter in group["params"]]
        peers.append(PeerGroup(group, parameters))
    assert {peer.period for peer in peers} == {1, 4, 16}

    for step in range(35):
        train(ours, optimizer, set_gradients, [step])
        set_gradients(theirs, step)
        for peer in peers:
            peer.step(step + 1)
        assert_same_weights(ours, theirs)
    report = optimizer.level_report()
    counts = {level: (row["updates"], row["steps_since_update"]) for level, row in report.items()}
    assert counts == {0: (35, 0), 1: (8, 3), 2: (2, 3)}
    assert report[2]["period_steps"] == 16 and report[2]["period_tokens"] == 1600


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [4, 21])
def test_a_pending_period_survives_saving(name, stop, leveled_model, set_gradients, settings):
    whole = leveled_model()
    uninterrupted = build_optimizer(whole, name, **settings)
    train(whole, uninterrupted, set_gradients, range(36))

    model = leveled_model()
    optimizer = build_optimizer(model, name, **settings)
    train(model, optimizer, set_gradients, range(stop))
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, set_gradients, [99])

    resumed = leveled_model()
    resumed.load_state_dict(weights)
    continued = build_optimizer(resumed, name, **settings)
    continued.load_state_dict(saved)
    train(resumed, continued, set_gradients, range(stop, 36))
    assert_same_weights(whole, resumed)
    assert continued.level_report() == uninterrupted.level_report()


def test_bfloat16_weights_keep_their_sums_in_float32(leveled_model, settings):
    model = leveled_model(periods=(100, 40_000)).bfloat16()
    optimizer = build_optimizer(model, "adamw", **settings)
    weight = model.levels[1].up_proj.weight
    for _ in range(300):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1.0)
        optimizer.step()
    fresh = build_optimizer(model, "adamw", **settings)
    fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = fresh.state[weight]
    # bfloat16 cannot count beyond 256.
    assert state["gradient_sum"].dtype == torch.float32 and (state["gradient_sum"] == 300).all()
    assert int(state["tick"]) == 300


def test_schedulers_scale_every_level(leveled_model, set_gradients, settings):
    """A level uses the rate of the step in which it fires; its first Adam update is as large as that rate."""
    model = leveled_model()
    optimizer = build_optimizer(model, "adamw", **settings | {"weight_decay": 0.0})
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=8, num_training_steps=100)
    weight = model.levels[1].up_proj.weight
    before = weight.detach().clone()
    for step in range(3):
        train(model, optimizer, set_gradients, [step])
        scheduler.step()
        assert torch.equal(weight, before)
    train(model, optimizer, set_gradients, [3])
    assert (weight - before).abs().median().item() == pytest.approx(2e-2 * 3 / 8, rel=1e-3)


def test_a_parameter_without_gradient_stands_still(leveled_model, set_gradients, settings):
    model = leveled_model()
    optimizer = build_optimizer(model, "adamw", **settings)
    absent, present = model.levels[1].up_proj.bias, model.levels[1].up_proj.weight
    for step in range(5):
        set_gradients(model, step)
        if step == 0:
            absent.grad = None
        optimizer.step()
    ticks = [int(optimizer.state[parameter]["tick"]) for parameter in (absent, present)]
    assert ticks == [0, 1]


def test_state_of_another_run_is_refused(leveled_model, set_gradients, settings):
    model = leveled_model()
    optimizer = build_optimizer(model, "adamw", **settings)
    train(model, optimizer, set_gradients, range(2))
    saved = optimizer.state_dict()
    for other in (
        build_optimizer(model, "muon", **settings),
        build_optimizer(model, "adamw", **settings | {"tokens_per_step": 200}),
        build_optimizer(leveled_model(periods=(100, 400)), "adamw", **settings),
    ):
        with pytest.raises(ValueError, match="another run"):
            other.load_state_dict(saved)
        assert not other.state


def test_short_runs_warn_of_slow_levels(leveled_model, settings):
    optimizer = build_optimizer(leveled_model(), "adamw", **settings)
    with pytest.warns(UserWarning, match="Level 2 .* 16 optimizer steps .* 3 times in this run of 63"):
        warn_short_levels(optimizer, max_train_steps=63)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_short_levels(optimizer, max_train_steps=64)
