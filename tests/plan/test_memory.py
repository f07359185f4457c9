"""Bytes of states as in the literature, peaks by arithmetic against the simulated step, and what moves them."""

from dataclasses import replace

import pytest
import torch
from models import small_config
from transformers import AutoConfig, LlamaConfig, Qwen2Config

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.common.recompute_flag import Recomputed
from hope_hf.plan.activations import activations, cache_bytes
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions, fsdp_strategy
from hope_hf.plan.memory import memory, shard_bytes
from hope_hf.plan.shapes import Shapes, Weight, shapes_of
from hope_hf.plan.simulate import simulate

LLAMA_7B = LlamaConfig()


def plan(config, key: str, world: int, precision: str = "no", parts: int | None = None, **options):
    """The arithmetic, and the arguments of the simulation."""
    strategy = STRATEGIES[key]
    launch = Launch(strategy, world, (parts or world) if strategy.shared else 1, precision)
    step = StepOptions(**{"batch_size": 1, "block_size": 256} | options)
    return memory(config, shapes_of(config), launch, step), (config, launch, step)


@pytest.mark.parametrize(
    ("name", "key", "world", "precision", "options", "within"),
    [
        ("tiny", "ddp", 1, "no", {"batch_size": 2}, 0.15),
        ("tiny", "full_shard", 4, "bf16", {"batch_size": 2, "checkpointing": "mixer"}, 0.15),
        ("llama", "ddp", 2, "bf16", {"batch_size": 2, "checkpointing": "every:2"}, 0.15),
        ("llama", "full_shard", 4, "no", {"accumulation": 2}, 0.1),
        ("llama", "full_shard", 4, "bf16", {"accumulation": 2, "sync_each_batch": True}, 0.1),
        ("gpt2", "ddp", 1, "no", {"batch_size": 2, "checkpointing": "block"}, 0.15),
        ("gpt2", "shard_grad_op", 4, "bf16", {"accumulation": 2}, 0.1),
    ],
)
def test_arithmetic_is_near_the_simulation(name, key, world, precision, options, within):
    fewer = {"tiny": {"num_hidden_layers": 2}, "gpt2": {"resid_pdrop": 0.0}}
    arithmetic, asked = plan(small_config(name, **fewer.get(name, {})), key, world, precision, **options)
    assert arithmetic.peak == pytest.approx(simulate(*asked).peak, rel=within), arithmetic.split


@pytest.mark.parametrize(
    ("fields", "within"),
    [
        ({"memory_rule": "paper"}, 0.1),
        ({"memory_projections": ["k"]}, 0.1),
        ({"layer_types": ["sparse_attention"] * 2}, 0.1),
        ({"layer_types": ["window_attention"] * 2, "sliding_window": 100, "attention_sinks": 4}, 0.1),
        ({"layer_types": ["full_attention"] * 2, "attention_bias": True, "mlp_bias": True, "use_qk_norm": True}, 0.07),
    ],
)
def test_other_mixers_are_near_the_simulation(fields, within):
    arithmetic, asked = plan(small_config("clocks", num_hidden_layers=2, **fields), "ddp", 1)
    assert arithmetic.peak == pytest.approx(simulate(*asked).peak, rel=within)


def test_other_architectures_are_estimates():
    config = Qwen2Config(hidden_size=256, intermediate_size=688, num_hidden_layers=4, vocab_size=1024,
                         num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    arithmetic, asked = plan(config, "ddp", 1, batch_size=4)
    assert arithmetic.is_estimate and arithmetic.peak == pytest.approx(simulate(*asked).peak, rel=0.3)


def test_whole_gradients_lie_between_accumulated_batches_in_the_dtype_of_their_sum():
    shapes = shapes_of(LLAMA_7B)
    fsdp1 = Launch(fsdp_strategy(True, False, 1, False), 8, 8, "bf16")
    fsdp2 = Launch(fsdp_strategy(False, False, 1, False), 8, 8, "bf16")
    step = StepOptions(1, 256, accumulation=4)
    for launch, dtype, size in ((fsdp2, torch.float32, 4), (fsdp2, torch.bfloat16, 2), (fsdp1, torch.float32, 2)):
        peak = memory(LLAMA_7B, shapes, launch, replace(step, reduce_dtype=dtype))
        assert peak.between_batches == size * shapes.count
    whole = memory(LLAMA_7B, shapes, fsdp2, step)
    once = memory(LLAMA_7B, shapes, fsdp2, replace(step, accumulation=1))
    reduced = memory(LLAMA_7B, shapes, fsdp2, replace(step, sync_each_batch=True))
    assert whole.peak - once.peak > 3 * shapes.count
    assert once.between_batches == reduced.between_batches == 0
    # DeepSpeed reduces after every batch.
    assert plan(LLAMA_7B, "zero2", 8, accumulation=4)[0].between_batches == 0


def test_one_block_is_gathered_at_a_time():
    full, _ = plan(LLAMA_7B, "full_shard", 8, "bf16")
    whole, _ = plan(LLAMA_7B, "shard_grad_op", 8, "bf16")
    assert full.gathered_block == 2 * 202_383_360
    assert whole.split["gathered"] == 2 * shapes_of(LLAMA_7B).count > 10 * full.split["gathered"]


def test_offloading_moves_all_states_to_the_machine():
    offloaded, _ = plan(LLAMA_7B, "fsdp_offload", 8, "bf16")
    assert offloaded.host == pytest.approx(16 * shapes_of(LLAMA_7B).count, rel=0.01)
    assert not {"weights", "gradients", "optimizer"} & set(offloaded.split)


def test_activations_do_not_grow_with_the_square_of_the_tokens():
    shapes, launch = shapes_of(LLAMA_7B), Launch(STRATEGIES["ddp"], 1, 1)
    one, two = (activations(LLAMA_7B, shapes, launch, 1, tokens, Recomputed("none")) for tokens in (2048, 4096))
    assert two.blocks == 2 * one.blocks


def test_levels_that_wait_hold_sums_of_gradients():
    config = small_config("clocks")
    often = plan(config, "ddp", 1, accumulation=10_000)[0].split["optimizer"]
    assert plan(config, "ddp", 1)[0].split["optimizer"] > often == 8 * shapes_of(config).count


def test_fp16_under_deepspeed_has_copies_of_two_bytes():
    wide, low = (plan(small_config("llama"), "zero2", 4, precision)[0].states for precision in ("no", "fp16"))
    assert wide["weights"] == 2 * low["weights"]


def test_the_largest_part_has_whole_rows():
    shapes = Shapes((Weight("a", (10, 3), 0, 0, {}), Weight("b", (1,), 0, 0, {})), False)
    assert shard_bytes(shapes, 4, by_rows=True) == 4 * (3 * 3 + 1)
    assert shard_bytes(shapes, 4, by_rows=False) == 31
    assert shard_bytes(shapes, 1, by_rows=True) == 4 * 31


@pytest.mark.parametrize(
    "fields",
    [{}, {"memory_rule": "paper"}, {"memory_projections": ["k", "v"]}, {"layer_types": ["full_attention"] * 2}]
    + [{"layer_types": ["sparse_attention"] * 2}, {"layer_types": ["window_attention"] * 2, "sliding_window": 20}],
)
def test_state_of_a_sequence_is_the_caches(fields, tiny_config):
    config = tiny_config(**fields)
    for tokens in (5, 70):
        cache = HopeCache(config)
        with torch.no_grad():
            HopeForCausalLM(config).eval()(torch.zeros(1, tokens, dtype=torch.long), cache=cache)
        size = 0
        for layer in cache.layers:
            state = getattr(layer, "state", None)
            for tensor in [layer.keys, layer.values] if state is None else state:
                size += sum(part.nbytes for part in (tensor if isinstance(tensor, tuple) else (tensor,)))
        assert cache_bytes(config, tokens) == size


def test_the_state_of_other_architectures():
    def of(kind, tokens, **fields):
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return cache_bytes(AutoConfig.for_model(kind, num_hidden_layers=2, hidden_size=64, **heads, **fields), tokens)

    assert of("llama", 100) == 4 * 2 * 2 * 100 * 2 * 16
    assert of("mistral", 1_000, sliding_window=128, head_dim=16) == 4 * 2 * 2 * 128 * 2 * 16
    assert of("qwen3_next", 100, layer_types=["linear_attention", "full_attention"]) is None
