"""What stays float32 in bfloat16, what the loss is at the start, and what it is divided by."""

import math

import pytest
import torch
import torch.nn.functional as F

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.model import chunk_steps, memory_update

OPTIONS = {
    "defaults": {},
    "momentum-adaptive-q": dict(memory_momentum=True, adaptive_q=True),
    "depth-1-memory-gates": dict(memory_depth=1, gate_mode="memory"),
    "zero-both": dict(memory_decay_to="zero", memory_erase="both"),
    "attention": dict(mixer="attention"),
}
MEMORIES = {name: options for name, options in OPTIONS.items() if name != "attention"}
PRECISIONS = ["float32", "autocast", "bfloat16"]


def text(*shape, vocab_size=64):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(4))


def in_precision(tiny_model, precision, **options):
    """A model and the context in which it runs; the weights are the same up to rounding."""
    model = tiny_model(torch.bfloat16 if precision == "bfloat16" else torch.float32, **options)
    return model, torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")


@pytest.fixture
def seen(monkeypatch):
    """Records the dtypes of what the memories compute with, by the place where they are seen."""
    dtypes = {}

    def record(place, *tensors):
        # autocast would round the inputs of a product of float32 tensors and leave no trace in the state's dtype
        assert not torch.is_autocast_enabled("cpu"), place
        dtypes.setdefault(place, set()).update(x.dtype for x in tensors if isinstance(x, torch.Tensor))

    solve = torch.linalg.solve_triangular

    def recorded_solve(matrix, right, **kwargs):
        solution = solve(matrix, right, **kwargs)
        record("solve", matrix, right, solution)
        return solution

    update = memory_update.update_chunk

    def recorded_update(state, initial, keys, values, gates, *args, **kwargs):
        record("gates", *gates[:3])
        record("tokens", keys, values)
        record("initial", *initial)
        reads, after = update(state, initial, keys, values, gates, *args, **kwargs)
        record("reads", reads)
        for part in (state, after or ()):
            record("state", *(weight for group in part for weight in group))
        return reads, after

    monkeypatch.setattr(torch.linalg, "solve_triangular", recorded_solve)
    monkeypatch.setattr(chunk_steps, "update_chunk", recorded_update)
    return dtypes


@pytest.mark.parametrize("options", MEMORIES.values(), ids=MEMORIES.keys())
@pytest.mark.parametrize("precision", PRECISIONS)
def test_state_gates_and_solve_are_float32(tiny_model, seen, precision, options):
    model, context = in_precision(tiny_model, precision, recompute_chunks=2, **options)
    cache = HopeCache(model.config)
    with context:
        out = model(text(2, 21), labels=text(2, 21), past_key_values=cache)
    assert seen.keys() == {"solve", "gates", "tokens", "initial", "reads", "state"}
    # chunks are computed once more in the backward pass, outside of the context
    out.loss.backward()
    assert set().union(*seen.values()) == {torch.float32}, seen
    cached = {name: tensor.dtype for name, tensor in cache.state_tensors().items() if tensor.is_floating_point()}
    assert any("conv_tail" in name for name in cached) and any("content.run" in name for name in cached)
    assert set(cached.values()) == {torch.float32}, cached


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_loss_and_gradients_stay_close_to_those_of_float32(tiny_model, precision, options):
    results = {}
    for name in ("float32", precision):
        model, context = in_precision(tiny_model, name, **options)
        with context:
            loss = model(text(2, 40), labels=text(2, 40)).loss
        loss.backward()
        results[name] = loss, {name: p.grad.float() for name, p in model.named_parameters()}
    (loss, gradients), (rounded_loss, rounded) = results.values()
    assert loss.dtype == rounded_loss.dtype == torch.float32
    assert rounded_loss.item() == pytest.approx(loss.item(), rel=5e-3)
    for name in gradients:
        assert rounded[name].isfinite().all(), name
        assert rounded[name].abs().max() > 0, name
    # the direction of the whole gradient
    ours, theirs = (torch.cat([g.flatten() for g in each.values()]) for each in (gradients, rounded))
    assert F.cosine_similarity(ours, theirs, dim=0) > 0.99


@pytest.mark.parametrize("options", MEMORIES.values(), ids=MEMORIES.keys())
def test_output_keeps_the_dtype_of_the_weights(tiny_model, options):
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        model = tiny_model(dtype, **options)
        assert model(text(1, 9)).logits.dtype == dtype


def initial_loss(model, ids):
    with torch.no_grad():
        return model(ids, labels=ids).loss.item()


@pytest.mark.parametrize(
    "config",
    [
        dict(vocab_size=4096, hidden_size=256, num_hidden_layers=4),
        dict(vocab_size=32000, hidden_size=1536, num_hidden_layers=1),
        dict(vocab_size=32000, hidden_size=1536, num_hidden_layers=1, tie_word_embeddings=True),
        dict(vocab_size=4096, hidden_size=256, num_hidden_layers=4, mixer="attention"),
    ],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
def test_loss_at_initialisation_is_that_of_a_uniform_guess(config):
    torch.manual_seed(0)
    model = HopeForCausalLM(HopeConfig(**config))
    ids = text(2, 128, vocab_size=config["vocab_size"])
    assert initial_loss(model, ids) == pytest.approx(math.log(config["vocab_size"]), rel=0.02)


def test_loss_at_initialisation_of_the_preset_tiny():
    torch.manual_seed(0)
    model = HopeForCausalLM(HopeConfig.from_preset("tiny"))
    assert initial_loss(model, text(2, 128, vocab_size=4096)) == pytest.approx(math.log(4096), rel=0.02)


def test_loss_is_the_mean_over_scored_next_tokens(tiny_model):
    model = tiny_model(torch.float64)
    ids = text(3, 12)
    labels = ids.clone()
    labels[0, :5] = -100
    labels[2] = -100
    out = model(ids, labels=labels)
    log_probabilities = out.logits.log_softmax(-1)
    scored = [(row, t) for row in range(3) for t in range(1, 12) if labels[row, t] != -100]
    losses = [-log_probabilities[row, t - 1, ids[row, t]] for row, t in scored]
    assert out.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)


def test_loss_is_divided_by_the_number_of_items_given(tiny_model):
    """Micro-batches with unequal numbers of scored tokens add up to the loss of the whole batch."""
    model = tiny_model(torch.float64)
    ids = text(4, 12)
    labels = ids.clone()
    labels[0, :9] = -100
    labels[3, 4:] = -100
    whole = model(ids, labels=labels)
    whole.loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    items = (labels[:, 1:] != -100).sum()
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        loss = model(ids[rows], labels=labels[rows], num_items_in_batch=items).loss
        loss.backward()
        parts.append(loss.item())
    assert sum(parts) == pytest.approx(whole.loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-5, atol=1e-8, msg=name)
    as_number = model(ids, labels=labels, num_items_in_batch=items.item()).loss
    assert as_number.item() == pytest.approx(whole.loss.item(), rel=1e-6)
