"""What training asks of the model: recomputation, truncated backpropagation, levels and their formulas."""

import pytest
import torch
import torch.nn.functional as F
from mixers import ATTENTION, MEMORIES, MIXED, STATES
from torch.utils.flop_counter import FlopCounterMode
from transformers import StaticCache

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.common.recompute import Recomputed, recompute_activations
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


def assert_same_bits(first, second):
    assert first[0] == second[0] and first[1].keys() == second[1].keys()
    for name, gradient in first[1].items():
        assert torch.equal(gradient, second[1][name]), name


RECOMPUTED = MEMORIES | STATES


@pytest.mark.parametrize("options", RECOMPUTED.values(), ids=RECOMPUTED)
@pytest.mark.parametrize("cuts", [[25], [10, 15]], ids=["one text", "carried segments"])
def test_recomputing_blocks_changes_no_bit(tiny_model, runs, options, cuts):
    segments = text(2, 25).split(cuts, dim=1)
    plain = losses_and_gradients(tiny_model(**options).train(), segments)
    once, runs[0] = runs[0], 0
    model = recompute(tiny_model(**options).train(), use_reentrant=False)
    assert_same_bits(losses_and_gradients(model, segments), plain)
    assert runs == [2 * once]


# how blocks are recomputed, and the lengths and detachment of segments
OTHERWISE = {
    "reentrant": (lambda model: recompute(model, use_reentrant=True), [25], False),
    "truncated": (lambda model: recompute(model, use_reentrant=False), [10, 15], True),
    "mixers": (lambda model: recompute_activations(model, Recomputed("mixer")), [10, 15], False),
    "every second": (lambda model: recompute_activations(model, Recomputed("block", every=2)), [10, 15], False),
}


@pytest.mark.parametrize("change, cuts, detach", OTHERWISE.values(), ids=OTHERWISE)
def test_recomputing_otherwise_changes_no_bit(tiny_model, change, cuts, detach):
    segments, model = text(2, 25).split(cuts, dim=1), tiny_model(**MIXED).train()
    plain = losses_and_gradients(tiny_model(**MIXED).train(), segments, detach)
    change(model)
    assert_same_bits(losses_and_gradients(model, segments, detach), plain)


@pytest.mark.parametrize("options", [{}, ATTENTION], ids=["memory", "attention"])
def test_recomputation_that_would_lose_the_carried_state_is_refused(tiny_model, options):
    """Of these, torch gives gradients without a word."""
    model, ids = tiny_model(**options).train(), text(1, 8)
    cache = StaticCache(model.config, max_cache_len=16)
    model(ids, cache=cache)
    recompute(model, use_reentrant=False)
    with pytest.raises(ValueError, match="StaticCache"):
        model(ids, cache=cache)
    with torch.no_grad():
        whole, part = model(ids.repeat(1, 2)).logits[:, 8:], model(ids, cache=cache).logits
    torch.testing.assert_close(part, whole, rtol=1e-5, atol=1e-5)
    recompute(model, use_reentrant=True)
    with pytest.raises(ValueError, match="use_reentrant=True"):
        model(ids, cache=HopeCache(model.config))
    assert model(ids, labels=ids).loss.requires_grad


@pytest.mark.parametrize("detach", [False, True])
def test_the_gradient_goes_through_the_carried_memory_unless_it_is_cut(tiny_model, detach):
    """The second segment's loss alone, by the first segment's tokens: backpropagation through time."""
    first, second = text(1, 36).split([17, 19], dim=1)
    model = tiny_model()
    embeddings = model.get_input_embeddings()(first).detach().requires_grad_()
    cache = HopeCache(model.config)
    model(inputs_embeds=embeddings, cache=cache)
    if detach:
        cache.detach_()
    model(second, labels=second, cache=cache).loss.backward()
    assert embeddings.grad is None if detach else embeddings.grad.abs().amax(-1).min() > 0


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
    levels = [module for module in model.modules() if hasattr(module, "level") and hasattr(module, "period")]
    assert [(level.level, level.period) for level in levels] == list(enumerate(periods)) * 2
    assert {(type(level.level), type(level.period)) for level in levels} == {(int, int)}
    owned = [id(parameter) for level in levels for parameter in level.parameters()]
    assert len(owned) == len(set(owned)) == 2 * 3 * 4


def swiglu(level, x):
    """`MLP_l(norm(x))` of equation (73), written out."""
    normed = x / (x.square().mean(-1, keepdim=True) + level.norm.variance_epsilon).sqrt() * level.norm.weight
    gate = normed @ level.gate_proj.weight.mT
    return (gate * gate.sigmoid() * (normed @ level.up_proj.weight.mT)) @ level.down_proj.weight.mT


@pytest.mark.parametrize("variant", ["sequential", "independent"])
def test_levels_are_a_chain_from_fast_to_slow_or_a_weighted_sum(tiny_config, variant):
    generator = torch.Generator().manual_seed(1)
    sizes = dict(level_periods=[1, 2, 4], level_intermediate_sizes=[8, 16, 24])
    continuum = CONTINUA[variant](tiny_config(level_variant=variant, **sizes)).double()
    with torch.no_grad():
        for parameter in continuum.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    x = expected = torch.randn(2, 5, 32, generator=generator, dtype=torch.float64)
    for number, level in enumerate(continuum.levels):
        if variant == "independent":
            expected = expected + continuum.mix.weight[number] * swiglu(level, x)
        else:
            expected = expected + swiglu(level, expected)
    torch.testing.assert_close(continuum(x), expected, rtol=1e-10, atol=1e-10)


def test_independent_levels_start_with_equal_weights_and_learn_them(tiny_model):
    model = tiny_model(level_variant="independent").train()
    mixes = [block.continuum.mix.weight for block in model.model.layers]
    assert all(torch.equal(mix, torch.ones(2)) for mix in mixes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(text(2, 20), labels=text(2, 20)).loss.backward()
    optimizer.step()
    assert all((mix != 1).all() and len(set(mix.tolist())) == 2 for mix in mixes)


def test_a_block_adds_its_mixer_and_levels_to_the_stream_and_nothing_else(tiny_model):
    """`x += mixer(norm(x))`, then every level: with both outputs silenced a block is the identity."""
    model, ids = tiny_model(**MIXED), text(1, 9)
    with torch.no_grad():
        for block in model.model.layers:
            block.mixer.o_proj.weight.zero_()
            for level in block.continuum.levels:
                level.down_proj.weight.zero_()
        x = model.get_input_embeddings()(ids)
        expected = F.rms_norm(x, (32,), model.model.norm.weight, model.config.rms_norm_eps)
        torch.testing.assert_close(model.model(ids).last_hidden_state, expected, rtol=1e-6, atol=1e-7)


def test_hidden_states_and_embeddings(tiny_model):
    model, ids = tiny_model(), text(1, 9)
    out = model(ids, output_hidden_states=True)
    assert [tuple(h.shape) for h in out.hidden_states] == [(1, 9, 32)] * 3
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, out.logits)


@torch.no_grad()
@pytest.mark.parametrize(
    "options",
    [{}, dict(memory_chunk_size=16, memory_projections=["v"]), dict(memory_rule="paper", memory_depth=2), MIXED],
    ids=["delta", "v", "paper", "mixed"],
)
def test_flops_per_token_are_those_that_torch_counts(monkeypatch, options):
    """Of the plain code: the fast one solves its triangular systems with products, which would be counted."""
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    fields = dict(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_memory_heads=2)
    model, ids = HopeForCausalLM(HopeConfig(**fields | options)), text(1, 512)
    with FlopCounterMode(display=False) as counter:
        model(ids, use_cache=False)
    counted = 3 * counter.get_total_flops() / ids.numel()
    assert model.flops_per_token(ids.shape[1]) == pytest.approx(counted, rel=0.05)
