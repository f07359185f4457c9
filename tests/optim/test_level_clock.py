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


def test_levels_equal_a_hand_written_loop(leveled_model, set_gradients, settings):
    """One torch AdamW per group, each given the mean gradient of its period and stepped at the period's end."""
    ours, theirs = leveled_model(), leveled_model()
    optimizer = build_optimizer(ours, "adamw", **settings)
    names = {parameter: name for name, parameter in ours.named_parameters()}
    peers = []
    for group in optimizer.param_groups:
        parameters = [theirs.get_parameter(names[parameter]) for parameter in group["params"]]
        keys = ("lr", "betas", "eps", "weight_decay")
        peer = torch.optim.AdamW(parameters, **{key: group[key] for key in keys}, fused=True)
        peers.append((peer, parameters, group["period_steps"], [torch.zeros_like(p) for p in parameters]))
    assert {period for _, _, period, _ in peers} == {1, 4, 16}

    for step in range(35):
        train(ours, optimizer, set_gradients, [step])
        set_gradients(theirs, step)
        for peer, parameters, period, sums in peers:
            for parameter, total in zip(parameters, sums, strict=True):
                total += parameter.grad
            if (step + 1) % period == 0:
                for parameter, total in zip(parameters, sums, strict=True):
                    parameter.grad = total / period
                    total.zero_()
                peer.step()
        assert_same_weights(ours, theirs)
    report = optimizer.level_report()
    assert {level: (row["updates"], row["steps_since_update"]) for level, row in report.items()} == {
        0: (35, 0),
        1: (8, 3),
        2: (2, 3),
    }
    assert report[2]["period_steps"] == 16 and report[2]["period_tokens"] == 1600


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("stop", [0, 4, 21])
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
    rates = []
    for step in range(4):
        rates.append(next(g["lr"] for g in optimizer.param_groups if g["level"] == 1))
        train(model, optimizer, set_gradients, [step])
        scheduler.step()
        assert torch.equal(weight, before) is (step < 3)
    assert rates == pytest.approx([2e-2 * step / 8 for step in range(4)])
    assert (weight - before).abs().median().item() == pytest.approx(rates[3], rel=1e-3)


def test_a_parameter_without_gradient_stands_still(leveled_model, set_gradients, settings):
    model = leveled_model()
    optimizer = build_optimizer(model, "adamw", **settings)
    absent = model.levels[1].up_proj.bias
    for step in range(5):
        set_gradients(model, step)
        if step == 0:
            absent.grad = None
        optimizer.step()
    assert (int(optimizer.state[absent]["step"]), int(optimizer.state[absent]["tick"])) == (1, 0)
    present = optimizer.state[model.levels[1].up_proj.weight]
    assert (int(present["step"]), int(present["tick"])) == (1, 1)


def test_closure_is_called_once_with_gradients(leveled_model, settings):
    model = leveled_model()
    optimizer = build_optimizer(model, "adamw", **settings)
    calls = []

    def closure():
        loss = model(torch.arange(12))
        loss.backward()
        calls.append(loss)
        return loss

    assert optimizer.step(closure) is calls[0]
    assert len(calls) == 1


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
        with pytest.raises(ValueError, match="belongs to another run .* resume with the batch size, --optimizer"):
            other.load_state_dict(saved)
        assert not other.state


def test_short_runs_warn_of_slow_levels(leveled_model, settings):
    optimizer = build_optimizer(leveled_model(), "adamw", **settings)
    sentence = "Level 2 steps once per 16 optimizer steps .* 3 times in this run of 63"
    with pytest.warns(UserWarning, match=sentence) as caught:
        warn_short_levels(optimizer, max_train_steps=63)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_short_levels(optimizer, max_train_steps=64)
