"""Bytes of weights, gradients and optimizer: the figures of the literature, and what this optimizer really holds."""

import pytest
from models import small_config
from transformers import GPT2Config

from hope_hf.optim import build_optimizer
from hope_hf.plan.shapes import Shapes, Weight, meta_model, shapes_of
from hope_hf.plan.states import Bytes, largest_model, level_periods, optimizer_bytes, shard_bytes, state_bytes
from hope_hf.plan.strategy import STRATEGIES

SEVEN_B = 7e9
PURE_BF16 = Bytes(weights=2, gradients=2)


@pytest.mark.parametrize(
    ("strategy", "gigabytes"),
    [("ddp", 112), ("zero1", 63), ("zero2", 38.5), ("zero3", 14), ("full_shard", 14), ("shard_grad_op", 14)],
)
def test_7b_with_adam_on_8_ranks_in_fp32(strategy, gigabytes):
    assert state_bytes(SEVEN_B, STRATEGIES[strategy], 8) == pytest.approx(gigabytes * 1e9)


def test_7b_with_bf16_weights():
    assert state_bytes(SEVEN_B, STRATEGIES["ddp"], 8, PURE_BF16) == pytest.approx(84e9)
    assert state_bytes(SEVEN_B, STRATEGIES["full_shard"], 8, PURE_BF16) == pytest.approx(10.5e9)
    # Ours stay fp32 under every mixed precision.
    assert state_bytes(SEVEN_B, STRATEGIES["full_shard"], 8) == pytest.approx(14e9)


def test_largest_model_of_8_gpus():
    assert largest_model(80e9, STRATEGIES["ddp"], 8) == pytest.approx(5e9)
    assert largest_model(80e9, STRATEGIES["full_shard"], 8) == pytest.approx(40e9)


def test_gpt2():
    parameters = shapes_of(GPT2Config()).count
    assert parameters == 124_439_808
    for strategy, parts, gigabytes in (("ddp", 4, 1.991), ("full_shard", 4, 0.498), ("full_shard", 8, 0.249)):
        assert state_bytes(parameters, STRATEGIES[strategy], parts) / 1e9 == pytest.approx(gigabytes, abs=5e-4)
    # Two moments, not 2 GB.
    assert 8 * parameters / 1e9 == pytest.approx(1.0, abs=5e-3)


def test_the_largest_part_has_whole_rows():
    shapes = Shapes((Weight("a", (10, 3), 0), Weight("b", (1,), 0)), True, False)
    assert shard_bytes(shapes, 4, by_rows=True) == 4 * (3 * 3 + 1)
    assert shard_bytes(shapes, 4, by_rows=False) == 31
    assert shard_bytes(shapes, 1, by_rows=True) == 4 * 31


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
# 512: the first level of `tiny` steps every second time, the fewest for which it adds up gradients.
@pytest.mark.parametrize("tokens_per_step", [1, 512, 1024, 65_536])
@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_optimizer_state_is_what_the_optimizer_creates(name, tokens_per_step, optimizer):
    config = small_config(name)
    model = meta_model(config)
    rest = {"learning_rate": 1, "weight_decay": 0.1, "betas": (0.9, 0.9), "eps": 1e-8}
    clock = build_optimizer(model, optimizer, tokens_per_step=tokens_per_step, **rest)
    clock.create_states()
    real = sum(tensor.nbytes for state in clock.state.values() for tensor in state.values() if tensor.ndim)
    shapes, periods = shapes_of(config), level_periods(config)
    each = [(weight, optimizer_bytes(weight, optimizer, periods, tokens_per_step)) for weight in shapes.weights]
    assert sum(weight.count * size for weight, size in each) == real
