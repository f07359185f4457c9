"""What training asks of the model: recomputation, truncated backpropagation, levels and their formulas."""

import pytest
import torch
import torch.nn.functional as F
from mixers import ATTENTION, MEMORIES, MIXED, random_ids
from torch.utils.flop_counter import FlopCounterMode
from transformers import StaticCache

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import Recomputed
from hope_hf.model.continuum import CONTINUA


def recompute(model, **options):
    """Switch gradient checkpointing on by the name that this release of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(options)
    return model


def count_runs(model):
    """A list that grows whenever the levels of a block run: twice where they are recomputed."""
    runs = []
    for block in model.model.layers:
        block.continuum.register_forward_pre_hook(lambda *_: runs.append(None))
    return runs


def losses_and_gradients(model, segments):
    """Each segment's loss, and the gradient of their sum; memories are carried from one to the next."""
    cache = HopeCache(model.config) if len(segments) > 1 else None
    losses = []
    for segment in segments:
        losses.append(model(segment, labels=segment, cache=cache).loss)
    sum(losses).backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


# layers, the lengths of carried segments, and how blocks are recomputed
RECOMPUTED = {
    "memories": ({}, [25], lambda model: recompute(model, use_reentrant=False)),
    "the paper's rule": (MEMORIES["paper-2"], [10, 15], lambda model: recompute(model, use_reentrant=False)),
    "all kinds of layers": (MIXED, [10, 15], lambda model: recompute(model, use_reentrant=False)),
    "reentrant": (MIXED, [25], lambda model: recompute(model, use_reentrant=True)),
    "mixers": (MIXED, [10, 15], lambda model: recompute_activations(model, Recomputed("mixer"))),
    "every second": (MIXED, [10, 15], lambda model: recompute_activations(model, Recomputed("block", every=2))),
}


@pytest.mark.parametrize("name", RECOMPUTED)
def test_recomputing_changes_no_bit(tiny_model, name):
    options, cuts, change = RECOMPUTED[name]
    segments = random_ids(2, 25).split(cuts, dim=1)
    plain, model = tiny_model(**options).train(), tiny_model(**options).train()
    change(model)
    plain_runs, runs = count_runs(plain), count_runs(model)
    expected = losses_and_gradients(plain, segments)
    torch.testing.assert_close(losses_and_gradients(model, segments), expected, rtol=0, atol=0)
    again = {"mixers": 0, "every second": 0.6}.get(name, 1)
    assert len(runs) == (1 + again) * len(plain_runs)


@pytest.mark.parametrize("options", [{}, ATTENTION], ids=["memory", "attention"])
def test_recomputation_that_would_lose_the_carried_state_is_refused(tiny_model, options):
    """Of these, torch gives gradients without a word."""
    model, ids = tiny_model(**options).train(), random_ids(1, 8)
    cache = StaticCache(model.config, max_cache_len=16)
    model(ids, cache=cache)
    recompute(model, use_reentrant=False)
    with pytest.raises(ValueError, match="StaticCache"):
        model(ids, cache=cache)
    recompute(model, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=True"):
        model(ids, cache=HopeCache(model.config))
    assert model(ids, labels=ids).loss.requires_grad


def test_levels_carry_their_number_and_period(tiny_model):
    periods = [3, 12, 50]
    model = tiny_model(level_periods=periods, level_intermediate_sizes=[8, 16, 24])
    levels = [module for module in model.modules() if hasattr(module, "period")]
    assert [(level.level, level.period) for level in levels] == list(enumerate(periods)) * 2


@pytest.mark.parametrize("variant", ["sequential", "independent"])
def test_levels_are_a_chain_from_fast_to_slow_or_a_weighted_sum(tiny_config, variant):
    """`test_attention.py` compares one level with Llama's."""
    generator = torch.Generator().manual_seed(1)
    sizes = dict(level_periods=[1, 2, 4], level_intermediate_sizes=[8, 16, 24])
    continuum = CONTINUA[variant](tiny_config(level_variant=variant, **sizes))
    with torch.no_grad():
        for parameter in continuum.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    x = expected = torch.randn(2, 5, 32, generator=generator)
    for number, level in enumerate(continuum.levels):
        if variant == "independent":
            expected = expected + continuum.mix.weight[number] * level(x)
        else:
            expected = expected + level(expected)
    torch.testing.assert_close(continuum(x), expected)


def test_a_block_adds_its_mixer_and_levels_to_the_stream_and_nothing_else(tiny_model):
    """`x += mixer(norm(x))`, then every level: with both outputs silenced a block is the identity."""
    model, ids = tiny_model(**MIXED), random_ids(1, 9)
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.o_proj.weight.zero_()
            for level in block.continuum.levels:
                level.down_proj.weight.zero_()
        x = model.get_input_embeddings()(ids)
        expected = F.rms_norm(x, (32,), model.model.norm.weight, model.config.rms_norm_eps)
        torch.testing.assert_close(model.model(ids).last_hidden_state, expected, rtol=1e-6, atol=1e-7)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [dict(memory_chunk_size=16, memory_projections=["v"]), dict(memory_rule="paper", memory_depth=2)],
    ids=["v", "paper"],
)
def test_flops_per_token_are_those_that_torch_counts(monkeypatch, options):
    """Of the plain code: the fast one solves its triangular systems with products, which would be counted."""
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    fields = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_memory_heads=2)
    model, ids = HopeForCausalLM(HopeConfig(**fields | options)), random_ids(1, 512)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    counted = 3 * counter.get_total_flops() / ids.numel()
    assert model.flops_per_token(ids.shape[1]) == pytest.approx(counted, rel=0.05)


def seen_by_window(t: int) -> int:
    """Keys that token `t` sees in a window of 64, and 4 sinks behind it."""
    window = min(t + 1, 64)
    return window + min(4, t + 1 - window)


def seen_by_retaining(t: int) -> int:
    """The same with blocks of 32, and at most 48 tokens that are retained behind window and sinks."""
    behind = max(0, t // 32 * 32 - 64)
    sinks = min(4, behind)
    return t + 1 - behind + sinks + min(48, behind - sinks)


def seen_by_sparse(t: int) -> int:
    """A window of 128, 4 chosen blocks of 16, and a compressed key of every 8 tokens."""
    return min(t + 1, 128) + min(t + 1, 4 * 16) + (t + 1) // 8


WINDOW = dict(sliding_window=64, attention_sinks=4)
SEEN = {
    "full": (lambda t: t + 1, {}),
    "window": (seen_by_window, WINDOW),
    "retaining": (seen_by_retaining, WINDOW | dict(retained_tokens=[[32, 64]], retained_block_size=32)),
    "sparse": (
        seen_by_sparse,
        dict(sparse_window=128, sparse_top_k=4, sparse_block_size=16, sparse_compress_stride=8),
    ),
}


@pytest.mark.parametrize("kind", SEEN)
def test_attention_counts_the_keys_that_its_tokens_see(kind):
    """4 FLOPs a channel and key, though a kernel may compute more and hide it: torch counts what kernels compute."""
    seen, fields = SEEN[kind]
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    config = HopeConfig(num_hidden_layers=1, layer_types=[f"{kind}_attention"], **heads, **fields)
    (mixer,) = config.mixers
    for tokens in (48, 2048):
        by_hand = 4 * 4 * 8 * sum(map(seen, range(tokens))) / tokens
        assert mixer.mixing_flops(config, tokens) == pytest.approx(by_hand, rel=0.03)
