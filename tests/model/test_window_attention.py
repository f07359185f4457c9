"""Attention with a window and sinks against its definition, query by query, in float64: outputs and gradients."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from mixers import WINDOW, LargestTensor
from transformers import MistralConfig, MistralForCausalLM

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.model import window_attention

KINDS = {
    "window and sinks": (6, 2),
    "no sinks": (6, 0),
    "a window of one token": (1, 3),
    "more sinks than window": (3, 7),
    "a window longer than a band": (11, 2),
    "a window longer than the text": (100, 4),
}
WIDTH = 32


def build(window, sinks, dtype=torch.float64, **options):
    torch.manual_seed(0)
    config = HopeConfig(
        vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2, head_dim=8, num_attention_heads=4,
        num_key_value_heads=2, level_periods=[1], level_intermediate_sizes=[24], initializer_range=0.3,
        **dict(layer_types=["window_attention"] * 2, sliding_window=window, attention_sinks=sinks) | options,
    )  # fmt: skip
    return HopeForCausalLM(config).to(dtype).eval()


def random_ids(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(1))


def random_texts(*shape):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def rotated(x, distances, frequencies):
    """Heads [D] turned by each of the distances [N], in tokens: [N, D]."""
    angles = (distances[:, None] * frequencies).repeat(1, 2)
    low, high = x.chunk(2, dim=-1)
    return x * angles.cos() + torch.cat([-high, low], dim=-1) * angles.sin()


def read_by_definition(mixer, hidden_states, frequencies):
    """The output [T, hidden_size] for one document [T, hidden_size]: each query with all keys that it sees."""
    window, sinks = mixer.config.sliding_window, mixer.config.attention_sinks
    queries, keys, values = (
        projection(hidden_states).unflatten(-1, (-1, mixer.head_dim))
        for projection in (mixer.q_proj, mixer.k_proj, mixer.v_proj)
    )
    if mixer.q_norm is not None:
        queries, keys = mixer.q_norm(queries), mixer.k_norm(keys)
    group = queries.shape[1] // keys.shape[1]
    outputs = []
    for at in range(len(hidden_states)):
        seen = [j for j in range(at + 1) if at - j < window or j < sinks]
        # a sink outside of the window stays where it was when the window was first full
        distances = torch.tensor([at - j if at - j < window else min(at, sinks + window - 1) - j for j in seen])
        reads = []
        for head, query in enumerate(queries[at]):
            scores = (rotated(query, distances, frequencies) * keys[seen, head // group]).sum(-1)
            reads.append((scores / mixer.head_dim**0.5).softmax(0) @ values[seen, head // group])
        outputs.append(torch.cat(reads))
    return mixer.o_proj(torch.stack(outputs))


def run(model, hidden_states, cuts=None, position_ids=None):
    """The first mixer's output for texts [B, T, hidden_size], read in calls of the lengths `cuts`."""
    mixer, state, past, reads = model.model.layers[0].mixer, None, None, []
    for length in cuts or [hidden_states.shape[1]]:
        start = sum(read.shape[1] for read in reads)
        part = hidden_states[:, start : start + length]
        positions = None if position_ids is None else position_ids[:, start : start + length]
        call = part.shape[:2], part.device, past, None, positions
        config = model.config
        plan = window_attention.plan_window(config.attention_sinks, config.sliding_window, part.dtype, *call)
        at = window_attention.window_positions(config, model.model.rotary_emb, part, plan)
        output, state, _ = mixer(part, state, window=plan, window_positions=at, need_state=True)
        past = plan.past
        reads.append(output)
    return torch.cat(reads, dim=1)


def assert_equal_with_gradients(ours, theirs, leaves):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found, expected = (torch.autograd.grad((out * weights).sum(), leaves) for out in (ours, theirs))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


def leaves_of(model, hidden_states):
    return [hidden_states, *model.model.layers[0].mixer.parameters()]


CUTS = {"one call": [29], "several calls": [2, 9, 1, 1, 16], "token by token": [1] * 29, "two calls": [15, 14]}


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("window, sinks", KINDS.values(), ids=KINDS)
def test_a_text_is_read_as_defined(monkeypatch, window, sinks, cuts):
    """In bands, and cut into any calls: the gradient also goes through the states between them."""
    monkeypatch.setattr(window_attention, "_BAND", 4)
    model = build(window, sinks, use_qk_norm=sinks > 2)
    hidden_states = random_texts(2, 29).requires_grad_()
    mixer, frequencies = model.model.layers[0].mixer, model.model.rotary_emb.inv_freq.double()
    expected = torch.stack([read_by_definition(mixer, row, frequencies) for row in hidden_states])
    # cosines and sines are computed in float32
    model.model.rotary_emb.forward = lambda x, position_ids: angles(frequencies, position_ids)
    assert_equal_with_gradients(run(model, hidden_states, cuts), expected, leaves_of(model, hidden_states))


def angles(frequencies, position_ids):
    turned = (position_ids[..., None] * frequencies).repeat(1, 1, 2)
    return turned.cos(), turned.sin()


@pytest.mark.parametrize("cuts", [[40], [11, 29], [3, 1, 1, 20, 15]])
@pytest.mark.parametrize("window, sinks", KINDS.values(), ids=KINDS)
def test_documents_of_a_row_are_read_by_themselves(monkeypatch, window, sinks, cuts):
    """They begin within bands, within later calls, and with a call."""
    monkeypatch.setattr(window_attention, "_BAND", 4)
    model, hidden_states = build(window, sinks), random_texts(3, 40).requires_grad_()
    lengths = [[11, 3, 1, 1, 24], [40], [2, 20, 18]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = run(model, hidden_states, cuts, positions)
    alone = torch.stack([
        torch.cat([run(model, document[None])[0] for document in row.split(pieces)])
        for row, pieces in zip(hidden_states, lengths, strict=True)
    ])  # fmt: skip
    assert_equal_with_gradients(packed, alone, leaves_of(model, hidden_states))


@torch.no_grad()
@pytest.mark.parametrize("window, sinks", KINDS.values(), ids=KINDS)
def test_weights_of_full_attention_read_the_same_while_the_text_is_short(window, sinks):
    full, ids = build(None, 0, layer_types=["full_attention"] * 2), random_ids(2, 40)
    model = build(window, sinks)
    model.load_state_dict(full.state_dict())
    short = ids[:, : window + sinks]
    torch.testing.assert_close(model(short).logits, full(short).logits, rtol=0, atol=1e-10)
    if window + sinks < 40:
        assert (model(ids).logits - full(ids).logits)[:, window + sinks :].abs().max() > 0.1


@torch.no_grad()
@pytest.mark.parametrize("cuts", [[40], [13, 27], [1] * 40])
def test_mistral_with_a_window_gives_the_same_logits(cuts):
    sizes = dict(vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2, head_dim=8, num_attention_heads=4,
                 num_key_value_heads=2)  # fmt: skip
    torch.manual_seed(0)
    mistral = MistralForCausalLM(
        MistralConfig(**sizes, intermediate_size=24, sliding_window=6, rms_norm_eps=1e-6, initializer_range=0.3)
    ).eval()
    model = build(6, 0, torch.float32)
    names = {"self_attn.": "mixer.", "post_attention_layernorm": "continuum.levels.0.norm",
             ".mlp.": ".continuum.levels.0."}  # fmt: skip
    weights = {}
    for name, weight in mistral.state_dict().items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        weights[name] = weight
    model.load_state_dict(weights)
    ids, cache = random_ids(2, 40), HopeCache(model.config)
    logits = torch.cat([model(part, cache=cache).logits for part in ids.split(cuts, dim=1)], dim=1)
    torch.testing.assert_close(logits, mistral(ids).logits, rtol=1e-5, atol=2e-5)


@torch.no_grad()
def test_the_state_has_one_size_and_a_call_changes_no_state_in_place():
    model, ids = build(6, 2), random_ids(2, 40)
    cache, sizes = HopeCache(model.config), set()
    for part in ids.split([1, 1, 9, 1, 20, 7, 1], dim=1):
        before = cache.snapshot().layers
        held = {name: tensor.clone() for name, tensor in cache.state_tensors().items()}
        model(part, cache=cache)
        sizes.add(sum(tensor.nbytes for tensor in cache.state_tensors().values()))
        assert held == {} or all(torch.equal(held[n], t) for n, t in state_tensors(before).items())
    assert len(sizes) == 1


def state_tensors(layers):
    return {f"{i}.{name}": tensor for i, layer in enumerate(layers) for name, tensor in layer.named_tensors().items()}


def test_nothing_of_the_size_of_the_square_is_built():
    largest = []
    for length in (512, 2048):
        hidden_states = random_texts(1, length).requires_grad_()
        with LargestTensor() as mode:
            run(build(16, 2), hidden_states).sum().backward()
        largest.append(mode.size)
    # scores of a band grow with its queries alone
    assert largest[1] <= max(4 * WIDTH * 2048, 4 * 128 * (128 + 16 + 2))


def test_dropout_acts_in_training_alone():
    model, ids = build(6, 2, attention_dropout=0.5), random_ids(1, 20)
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.train()
    assert (model(ids).logits - model(ids).logits).abs().max() > 1e-3


ERRORS = {
    "no window": ({"sliding_window": None}, "`layer_types` holds 'window_attention': give its `sliding_window`"),
    "window of 0": ({"sliding_window": 0}, "`sliding_window` must be at least 1, got 0"),
    "sinks": ({"attention_sinks": -1}, "`attention_sinks` must be at least 0, got -1"),
    "no layer": ({"layer_types": ["full_attention"] * 2}, r"`sliding_window` \(6\) is given and no layer has a"),
}  # fmt: skip


@pytest.mark.parametrize("options, sentence", ERRORS.values(), ids=ERRORS)
def test_bad_configurations(options, sentence):
    with pytest.raises(StrictDataclassError) as caught:
        HopeConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, **WINDOW | options)
    with pytest.raises(ValueError, match=sentence):
        raise caught.value.__cause__


def test_a_cache_of_another_window():
    ids, cache = random_ids(1, 9), HopeCache(build(6, 2).config)
    build(6, 2)(ids, cache=cache)
    with pytest.raises(ValueError, match="windows of 8 tokens with 2 heads of width 8, and this .* 13 tokens"):
        build(11, 2)(ids, cache=cache)
