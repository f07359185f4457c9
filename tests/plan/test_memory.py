"""Bytes of states as in the literature, peaks by arithmetic against the simulated step, and what moves them."""

from dataclasses import replace

import pytest
import torch
from models import small_config
from transformers import AutoConfig, GPT2Config, LlamaConfig, Qwen2Config

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM, HopeModel
from hope_hf.common.recompute import Recomputed
from hope_hf.model.inputs import Documents
from hope_hf.model.sparse_attention import HopeSparseAttention
from hope_hf.model.window_attention import HopeWindowAttention
from hope_hf.plan.activations import activations, cache_bytes
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions, fsdp_strategy
from hope_hf.plan.memory import Bytes, memory, shard_bytes, state_bytes
from hope_hf.plan.shapes import Shapes, Weight, shapes_of
from hope_hf.plan.simulate import simulate

LLAMA_7B = LlamaConfig()
SEVEN_B = 7e9
PURE_BF16 = Bytes(weights=2, gradients=2)


def plan(config, key: str, world: int, precision: str = "no", parts: int | None = None, **options):
    strategy = STRATEGIES[key]
    launch = Launch(strategy, world, (parts or world) if strategy.shared else 1, precision)
    step = StepOptions(**{"batch_size": 1, "block_size": 256} | options)
    return memory(config, shapes_of(config), launch, step), (config, launch, step)


@pytest.mark.parametrize("checkpointing", ["none", "block"])
@pytest.mark.parametrize(
    ("key", "world", "precision"), [("ddp", 1, "no"), ("ddp", 2, "bf16"), ("full_shard", 4, "bf16")]
)
@pytest.mark.parametrize("name", ["tiny", "llama", "gpt2"])
def test_arithmetic_is_near_the_simulation(name, key, world, precision, checkpointing):
    fewer = {"tiny": {"num_hidden_layers": 2}, "gpt2": {"resid_pdrop": 0.0}}
    config = small_config(name, **fewer.get(name, {}))
    counted, asked = plan(config, key, world, precision, batch_size=2, checkpointing=checkpointing)
    peak = simulate(*asked).peak
    assert counted.peak == pytest.approx(peak, rel=0.15), (counted.split, counted.moment)


@pytest.mark.parametrize(
    ("name", "key", "world", "precision", "checkpointing"),
    [
        ("tiny", "full_shard", 4, "bf16", "mixer"),
        ("llama", "full_shard", 4, "bf16", "mixer"),
        ("llama", "ddp", 2, "bf16", "every:2"),
        ("gpt2", "ddp", 1, "no", "mixer"),
    ],
)
def test_other_parts_that_are_recomputed_are_near_the_simulation(name, key, world, precision, checkpointing):
    test_arithmetic_is_near_the_simulation(name, key, world, precision, checkpointing)


@pytest.mark.parametrize("sync", [False, True])
@pytest.mark.parametrize(
    ("name", "key", "world", "precision", "checkpointing"),
    [
        ("llama", "ddp", 2, "bf16", "none"),
        ("llama", "full_shard", 4, "bf16", "block"),
        ("llama", "full_shard", 4, "no", "none"),
        ("gpt2", "shard_grad_op", 4, "bf16", "none"),
    ],
)
def test_accumulated_batches_are_near_the_simulation(name, key, world, precision, checkpointing, sync):
    options = dict(accumulation=4, sync_each_batch=sync, checkpointing=checkpointing)
    counted, asked = plan(small_config(name), key, world, precision, **options)
    assert counted.peak == pytest.approx(simulate(*asked).peak, rel=0.1), (counted.split, counted.moment)


@pytest.mark.parametrize(
    "fields", [{"memory_rule": "paper"}, {"memory_rule": "paper", "memory_depth": 2}, {"memory_projections": ["k"]}]
)
def test_other_memories_are_near_the_simulation(fields):
    counted, asked = plan(small_config("clocks", num_hidden_layers=2, **fields), "ddp", 1, block_size=512)
    assert counted.peak == pytest.approx(simulate(*asked).peak, rel=0.3)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_attention_with_biases_and_norms_is_near_the_simulation(precision):
    fields = dict(level_intermediate_sizes=[688], level_periods=[1], layer_types=["full_attention"] * 4)
    flags = dict.fromkeys(("attention_bias", "mlp_bias", "use_qk_norm"), True)
    counted, asked = plan(small_config("tiny", **fields, **flags), "ddp", 1, precision, batch_size=4)
    assert counted.peak == pytest.approx(simulate(*asked).peak, rel=0.07), counted.split


def test_other_architectures_are_estimates():
    config = Qwen2Config(hidden_size=256, intermediate_size=688, num_hidden_layers=4, vocab_size=1024,
                         num_attention_heads=4, num_key_value_heads=4)  # fmt: skip
    counted, asked = plan(config, "ddp", 1, batch_size=4)
    assert counted.is_estimate
    assert counted.peak == pytest.approx(simulate(*asked).peak, rel=0.3)


def test_whole_gradients_lie_between_accumulated_batches():
    parameters = shapes_of(LLAMA_7B).count
    held, _ = plan(LLAMA_7B, "full_shard", 8, accumulation=4)
    assert held.between_batches == 4 * parameters
    assert plan(LLAMA_7B, "full_shard", 8, accumulation=4, sync_each_batch=True)[0].between_batches == 0
    assert plan(LLAMA_7B, "full_shard", 8)[0].between_batches == 0
    assert plan(LLAMA_7B, "zero2", 8, accumulation=4)[0].between_batches == 0
    assert held.peak - plan(LLAMA_7B, "full_shard", 8)[0].peak > 3 * parameters


def test_whole_gradients_have_the_dtype_in_which_they_are_added_up():
    shapes, step = shapes_of(LLAMA_7B), StepOptions(1, 256, accumulation=4)
    for old, dtype, size in ((False, "float32", 4), (False, "bfloat16", 2), (True, "float32", 2)):
        launch = Launch(fsdp_strategy(old, False, 1, False), 8, 8, "bf16")
        found = memory(LLAMA_7B, shapes, launch, replace(step, reduce_dtype=getattr(torch, dtype)))
        assert found.between_batches == size * shapes.count


def test_one_block_is_gathered_at_a_time():
    found, _ = plan(LLAMA_7B, "full_shard", 8, "bf16")
    assert found.gathered_block == 2 * 202_383_360
    whole, _ = plan(LLAMA_7B, "shard_grad_op", 8, "bf16")
    assert whole.split["gathered"] == 2 * shapes_of(LLAMA_7B).count
    assert found.split["gathered"] < whole.split["gathered"] / 10


def test_offloading_moves_all_states_to_the_machine():
    found, _ = plan(LLAMA_7B, "fsdp_offload", 8, "bf16")
    assert found.host == pytest.approx(16 * shapes_of(LLAMA_7B).count, rel=0.01)
    assert not {"weights", "gradients", "optimizer"} & set(found.split)


def test_activations_do_not_grow_with_the_square_of_the_tokens():
    launch = Launch(STRATEGIES["ddp"], 1, 1)
    shapes, kept = shapes_of(LLAMA_7B), Recomputed("none")
    one, two = (activations(LLAMA_7B, shapes, launch, 1, tokens, kept) for tokens in (2048, 4096))
    assert two.blocks == 2 * one.blocks


def test_levels_that_wait_hold_sums_of_gradients():
    config = small_config("clocks")
    often = plan(config, "ddp", 1, accumulation=10_000)[0].split["optimizer"]
    assert plan(config, "ddp", 1)[0].split["optimizer"] > often == 8 * shapes_of(config).count


@pytest.mark.parametrize("key", STRATEGIES)
@pytest.mark.parametrize("world", [2, 8, 64, 1024])
def test_more_processes_never_need_more(key, world):
    config = small_config("llama")
    here, more = (plan(config, key, size, parts=min(size, 8) if key == "hybrid_shard" else None)[0].peak
                  for size in (world, 2 * world))  # fmt: skip
    assert more <= here


def test_fp16_under_deepspeed_has_copies_of_two_bytes():
    config = small_config("llama")
    step = StepOptions(1, 64)
    launch = Launch(STRATEGIES["zero2"], 4, 4, "fp16")
    wide, low = (
        memory(config, shapes_of(config), replace(launch, precision=precision), step).split["weights"]
        for precision in ("no", "fp16")
    )
    assert wide == 2 * low


@pytest.mark.parametrize("groups", [1, 4])
def test_what_sparse_attention_keeps(groups):
    """Also the queries of every block."""
    sizes = dict(sparse_block_size=16, sparse_compress_stride=8, sparse_top_k=8, sparse_window=64)
    found, config = kept_of(1024, num_key_value_heads=groups, layer_types=["sparse_attention"], **sizes)
    expected = HopeSparseAttention.kept_bytes(config, 1, 1, 4)
    assert found / 1024 + 8 * config.sparse_top_k * groups == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    "rows, groups, sinks, tokens", [(1, 1, 4, 1000), (2, 4, 4, 600), (2, 2, 0, 600), (1, 4, 4, 90)]
)
def test_what_attention_with_a_window_keeps(rows, groups, sinks, tokens):
    fields = dict(layer_types=["window_attention"], sliding_window=100, attention_sinks=sinks)
    found, config = kept_of(tokens, rows, num_key_value_heads=groups, **fields)
    assert found == pytest.approx(HopeWindowAttention.kept_bytes(config, rows, tokens, 4), rel=0.03)


def kept_of(tokens: int, rows: int = 1, **fields) -> tuple[int, HopeConfig]:
    """Bytes of storages that a layer's mixer saves for the backward pass, and the configuration."""
    config = HopeConfig(vocab_size=8, hidden_size=256, num_hidden_layers=1, level_intermediate_sizes=[8] * 3, **fields)
    model = HopeModel(config)
    hidden_states = torch.randn(rows, tokens, 256, requires_grad=True)
    plans, _ = model._plans(hidden_states, None, Documents(None, None), None)
    # of the mixer's input the normalisation before it keeps account; plans are those of all layers
    others = [hidden_states, *model.parameters()]
    for plan in plans.values():
        others += plan if isinstance(plan, tuple) else ()
    known = {part.untyped_storage().data_ptr() for part in others}
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model.layers[0].mixer(hidden_states, **plans)[0]
    assert output.requires_grad
    return sum(storage.nbytes() for storage in saved.values()), config


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


def test_gpt2():
    parameters = shapes_of(GPT2Config()).count
    assert parameters == 124_439_808
    for strategy, parts, gigabytes in (("ddp", 4, 1.991), ("full_shard", 4, 0.498), ("full_shard", 8, 0.249)):
        assert state_bytes(parameters, STRATEGIES[strategy], parts) / 1e9 == pytest.approx(gigabytes, abs=5e-4)
    # Two moments, not 2 GB.
    assert 8 * parameters / 1e9 == pytest.approx(1.0, abs=5e-3)


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
@pytest.mark.parametrize("tokens", [5, 64, 70])
def test_state_of_a_sequence_is_the_caches(fields, tokens, tiny_config):
    config = tiny_config(**fields)
    cache = HopeCache(config)
    with torch.no_grad():
        HopeForCausalLM(config).eval()(torch.zeros(1, tokens, dtype=torch.long), cache=cache)
    held = 0
    for layer in cache.layers:
        state = getattr(layer, "state", None)
        tensors = [layer.keys, layer.values] if state is None else [*state]
        flat = [part for tensor in tensors for part in (tensor if isinstance(tensor, tuple) else (tensor,))]
        held += sum(part.nbytes for part in flat)
    assert cache_bytes(config, tokens) == held


def test_the_state_of_other_architectures():
    def of(kind, tokens, **fields):
        return cache_bytes(AutoConfig.for_model(kind, num_hidden_layers=2, hidden_size=64, **fields), tokens)

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    assert of("llama", 100, **heads) == 4 * 2 * 2 * 100 * 2 * 16
    assert of("mistral", 1_000, sliding_window=128, head_dim=16, **heads) == 4 * 2 * 2 * 128 * 2 * 16
    assert of("mamba2", 100, num_heads=8, head_dim=16) is None
    assert of("qwen3_next", 100, layer_types=["linear_attention", "full_attention"], **heads) is None
