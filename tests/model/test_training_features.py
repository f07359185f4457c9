"""What training asks of the model: recomputation, truncated backpropagation, levels and their formulas."""

import pytest
import torch
import torch.nn.functional as F
from mixers import ATTENTION, HYBRID, LAYERS, MEMORIES, MIXERS, SPARSE_HYBRID
from torch.utils.flop_counter import FlopCounterMode
from transformers import StaticCache

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.common.recompute import Recomputed, recompute_activations
from hope_hf.model.backends import FAST
from hope_hf.model.continuum import CONTINUA, ContinuumMemory


def text(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(6))


def recompute(model, **options):
    """Switch gradient checkpointing on by the name that this release of transformers has for it."""
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable(options)
    return model


@pytest.fixture
def runs(monkeypatch):
    """Counts how often a block runs: twice where it is recomputed."""
    count = [0]
    forward = ContinuumMemory.forward

    def counted(self, *args, **kwargs):
        count[0] += 1
        return forward(self, *args, **kwargs)

    # a part of the block: the block's own forward may be wrapped by the recomputation
    monkeypatch.setattr(ContinuumMemory, "forward", counted)
    return count


def losses_and_gradients(model, segments, detach=False):
    """Each segment's loss, and the gradient of their sum; memories are carried from one to the next."""
    cache = HopeCache(model.config) if len(segments) > 1 else None
    losses = []
    for segment in segments:
        losses.append(model(segment, labels=segment, cache=cache).loss)
        if detach:
            cache.detach_()
    sum(losses).backward()
    return [loss.item() for loss in losses], {name: p.grad for name, p in model.named_parameters()}


def assert_equal(first, second):
    assert first[0] == second[0]
    assert first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name]), name


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputing_blocks_changes_no_bit(tiny_model, runs, options, reentrant):
    ids = text(2, 37)
    plain = losses_and_gradients(tiny_model(**options).train(), [ids])
    assert runs == [2]
    model = recompute(tiny_model(**options).train(), use_reentrant=reentrant)
    assert_equal(losses_and_gradients(model, [ids]), plain)
    assert runs == [2 + 4]


CARRIED = MIXERS | {"attention": ATTENTION}


@pytest.mark.parametrize("options", CARRIED.values(), ids=CARRIED.keys())
@pytest.mark.parametrize("detach", [False, True])
def test_recomputing_blocks_across_carried_segments_changes_no_bit(tiny_model, runs, options, detach):
    segments = text(2, 42).split([19, 23], dim=1)
    plain = losses_and_gradients(tiny_model(**options).train(), segments, detach)
    model = recompute(tiny_model(**options).train(), use_reentrant=False)
    assert_equal(losses_and_gradients(model, segments, detach), plain)
    assert runs == [4 + 8]


@pytest.mark.parametrize("options", [HYBRID, ATTENTION, SPARSE_HYBRID], ids=["hybrid", "attention", "sparse-hybrid"])
@pytest.mark.parametrize("what", [Recomputed("mixer"), Recomputed("block", every=2)], ids=["mixer", "every-2"])
def test_recomputing_parts_across_carried_segments_changes_no_bit(tiny_model, options, what):
    segments = text(2, 42).split([19, 23], dim=1)
    plain = losses_and_gradients(tiny_model(**options).train(), segments)
    model = tiny_model(**options).train()
    recompute_activations(model, what)
    assert_equal(losses_and_gradients(model, segments), plain)


@pytest.mark.parametrize("options", [{}, ATTENTION], ids=["memory", "attention"])
def test_recomputation_that_would_lose_the_carried_state_is_refused(tiny_model, options):
    """Of these, torch gives gradients without a word."""
    model, ids = tiny_model(**options).train(), text(1, 8)
    cache = StaticCache(model.config, max_cache_len=16)
    model(ids, cache=cache)
    recompute(model, use_reentrant=False)
    with pytest.raises(ValueError, match="the cache is a StaticCache that is overwritten before gradient check"):
        model(ids, cache=cache)
    with torch.no_grad():
        whole, part = model(ids.repeat(1, 2)).logits[:, 8:], model(ids, cache=cache).logits
    torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)
    recompute(model, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=True cuts the gradient that goes through the cache"):
        model(ids, cache=HopeCache(model.config))
    assert model(ids, labels=ids).loss.requires_grad


@pytest.mark.parametrize("options", (MEMORIES | {"hybrid": HYBRID}).values(), ids=[*MEMORIES, "hybrid"])
@pytest.mark.parametrize("group", [1, 2, 3])
def test_recomputing_chunks_changes_nothing(tiny_model, options, group):
    """But the order in which gradients are added up."""
    segments = text(2, 42).split([19, 23], dim=1)
    plain, recomputed = (
        losses_and_gradients(tiny_model(torch.float64, recompute_chunks=size, **options).train(), segments)
        for size in (0, group)
    )
    assert recomputed[0] == plain[0]
    torch.testing.assert_close(recomputed[1], plain[1], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("kind", ["sparse", "sparse-hybrid"])
def test_a_cached_text_of_documents_has_the_gradients_of_the_whole_row(tiny_model, kind):
    ids, positions = text(2, 24), torch.cat([torch.arange(15), torch.arange(9)]).expand(2, -1)
    found = []
    for cuts in ([24], [10, 14]):
        model = tiny_model(torch.float64, **LAYERS[kind]).train()
        cache = HopeCache(model.config)
        parts = zip(ids.split(cuts, dim=1), positions.split(cuts, dim=1), strict=True)
        logits = [model(part, position_ids=places, cache=cache).logits for part, places in parts]
        torch.cat(logits, dim=1).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


def test_the_gradient_goes_through_the_carried_memory_unless_it_is_cut(tiny_model):
    """The second segment's loss alone, by the first segment's tokens: backpropagation through time."""
    first, second = text(1, 36).split([17, 19], dim=1)
    gradients = {}
    for detach in (False, True):
        model = tiny_model()
        embeddings = model.get_input_embeddings()(first).detach().requires_grad_()
        cache = HopeCache(model.config)
        model(inputs_embeds=embeddings, cache=cache)
        if detach:
            cache.detach_()
        model(second, labels=second, cache=cache).loss.backward()
        gradients[detach] = embeddings.grad
    assert gradients[False].abs().amax(-1).min() > 0
    assert gradients[True] is None


def test_carried_segments_give_the_gradients_of_one_text(tiny_model):
    ids = text(2, 40)
    whole, parts = tiny_model(torch.float64), tiny_model(torch.float64)
    whole(ids).logits.square().mean().backward()
    cache = HopeCache(parts.config)
    logits = [parts(part, cache=cache).logits for part in ids.split([13, 27], dim=1)]
    torch.cat(logits, dim=1).square().mean().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parts.get_parameter(name).grad, parameter.grad, rtol=1e-8, atol=1e-11, msg=name)


def test_a_given_cache_is_used_whatever_use_cache_says(tiny_model):
    """transformers sets `use_cache` to False in training; a memory that is handed over must be read and written."""
    ids = text(1, 20)
    model = recompute(tiny_model().train(), use_reentrant=False)
    cache = HopeCache(model.config)
    parts = [model(part, cache=cache, use_cache=False).logits for part in ids.split([9, 11], dim=1)]
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, rtol=1e-5, atol=1e-5)


def test_levels_carry_their_number_and_period(tiny_model):
    periods = [3, 12, 50]
    model = tiny_model(level_periods=periods, level_intermediate_sizes=[8, 16, 24])
    levels = [m for m in model.modules() if hasattr(m, "level") and hasattr(m, "period")]
    assert [(m.level, m.period) for m in levels] == list(enumerate(periods)) * 2
    assert {(type(m.level), type(m.period)) for m in levels} == {(int, int)}
    assert [m.up_proj.out_features for m in levels] == [8, 16, 24] * 2
    owned = [id(p) for m in levels for p in m.parameters()]
    assert len(owned) == len(set(owned)) == 2 * 3 * 4


def swiglu(level, x):
    """`MLP_l(norm(x))` of equation (73), written out."""
    normed = x / (x.square().mean(-1, keepdim=True) + level.norm.variance_epsilon).sqrt() * level.norm.weight
    gate = normed @ level.gate_proj.weight.mT
    return (gate * gate.sigmoid() * (normed @ level.up_proj.weight.mT)) @ level.down_proj.weight.mT


def build_continuum(tiny_config, variant):
    generator = torch.Generator().manual_seed(1)
    continuum = CONTINUA[variant](
        tiny_config(level_variant=variant, level_periods=[1, 2, 4], level_intermediate_sizes=[8, 16, 24])
    ).double()
    with torch.no_grad():
        for parameter in continuum.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return continuum, torch.randn(2, 5, 32, generator=generator, dtype=torch.float64)


def test_sequential_levels_are_a_chain_from_fast_to_slow(tiny_config):
    continuum, x = build_continuum(tiny_config, "sequential")
    expected = x
    for level in range(3):
        expected = expected + swiglu(continuum.levels[level], expected)
    torch.testing.assert_close(continuum(x), expected, rtol=1e-10, atol=1e-10)


def test_independent_levels_are_a_weighted_sum(tiny_config):
    continuum, x = build_continuum(tiny_config, "independent")
    weights = continuum.mix.weight
    assert weights.shape == (3,)
    expected = x + sum(weights[level] * swiglu(continuum.levels[level], x) for level in range(3))
    torch.testing.assert_close(continuum(x), expected, rtol=1e-10, atol=1e-10)


def test_independent_levels_start_with_equal_weights_and_learn_them(tiny_model):
    model = tiny_model(level_variant="independent").train()
    mixes = [block.continuum.mix.weight for block in model.model.layers]
    assert all(torch.equal(mix, torch.ones(2)) for mix in mixes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(text(2, 20), labels=text(2, 20)).loss.backward()
    optimizer.step()
    for mix in mixes:
        assert (mix != 1).all()
        assert len(set(mix.tolist())) == 2


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
def test_a_block_adds_its_mixer_and_levels_to_the_stream_and_nothing_else(tiny_model, options):
    """`x += mixer(norm(x))`, then every level: with both outputs silenced a block is the identity."""
    model = tiny_model(**options)
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.o_proj.weight.zero_()
            for level in block.continuum.levels:
                level.down_proj.weight.zero_()
        ids = text(1, 9)
        x = model.get_input_embeddings()(ids)
        expected = F.rms_norm(x, (32,), model.model.norm.weight, model.config.rms_norm_eps)
        torch.testing.assert_close(model.model(ids).last_hidden_state, expected, rtol=1e-6, atol=1e-7)


def test_hidden_states_of_every_block_can_be_asked_for(tiny_model):
    model = tiny_model()
    out = model(text(1, 9), output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(1, 9, 32)] * 3


def test_inputs_are_ids_or_embeddings(tiny_model):
    model = tiny_model()
    embeddings = model.get_input_embeddings()(text(1, 9))
    assert torch.equal(model(inputs_embeds=embeddings).logits, model(text(1, 9)).logits)
    for inputs in ({}, dict(input_ids=text(1, 9), inputs_embeds=embeddings)):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**inputs)


@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(memory_chunk_size=16),
        dict(memory_projections=[]),
        dict(memory_projections=["v"]),
        dict(memory_rule="paper"),
        dict(memory_rule="paper", memory_depth=2),
    ],
    ids=str,
)
def test_flops_per_token_are_those_that_torch_counts(monkeypatch, options):
    """Of the plain scan: the fused one solves its triangular systems with products, which would be counted."""
    monkeypatch.delitem(FAST, "scan_delta")
    config = HopeConfig(**dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_memory_heads=2) | options)
    model = HopeForCausalLM(config)
    ids = text(1, 512)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    counted = 3 * counter.get_total_flops() / ids.numel()
    assert model.flops_per_token(ids.shape[1]) == pytest.approx(counted, rel=0.05)
