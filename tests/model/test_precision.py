"""What stays float32 in bfloat16, what the loss is at the start, and what it is divided by."""

import math

import pytest
import torch
import torch.nn.functional as F
from mixers import ATTENTION, HYBRID, MEMORIES, MIXERS

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
from hope_hf.model import memory_mixer
from hope_hf.model.backends import FAST
from hope_hf.model.cache_file import named_tensors

PRECISIONS = ["float32", "autocast", "bfloat16"]


def text(*shape, vocab_size=64):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(4))


def in_precision(tiny_model, precision, **options):
    """A model and the context in which it runs; the weights are the same up to rounding."""
    model = tiny_model(torch.bfloat16 if precision == "bfloat16" else torch.float32, **options)
    return model, torch.autocast("cpu", torch.bfloat16, enabled=precision.startswith("autocast"))


def tensors_in(value):
    """All tensors in nested tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from tensors_in(part)


@pytest.fixture
def seen(monkeypatch):
    """Records the dtypes of what the memories compute with, by the place where they are seen."""
    dtypes = {}

    def record(place, *values):
        # autocast would round the inputs of a product of float32 tensors and leave no trace in the state's dtype
        assert not torch.is_autocast_enabled("cpu"), place
        dtypes.setdefault(place, set()).update(tensor.dtype for tensor in tensors_in(values))

    def recorded(run):
        def scan(inputs, memories, state, spans, need_state=True, **options):
            record("inputs", inputs)
            record("memories", memories)
            reads, after = run(inputs, memories, state, spans, need_state, **options)
            record("reads", reads)
            record("state", state, after)
            return reads, after

        return scan

    products = {name: getattr(torch, name) for name in ("bmm", "baddbmm")}
    products["solve_triangular"] = torch.linalg.solve_triangular

    def recorded_product(name):
        def product(*args, **kwargs):
            result = products[name](*args, **kwargs)
            record("products", args, result)
            return result

        return product

    for name in products:
        monkeypatch.setattr(torch.linalg if name == "solve_triangular" else torch, name, recorded_product(name))
    monkeypatch.setitem(FAST, "scan_delta", recorded(FAST["scan_delta"]))
    monkeypatch.setattr(memory_mixer, "scan_plain", recorded(memory_mixer.scan_plain))
    return dtypes


@pytest.mark.parametrize("options", (MEMORIES | {"hybrid": HYBRID}).values(), ids=[*MEMORIES, "hybrid"])
@pytest.mark.parametrize("precision", [*PRECISIONS, "autocast in the backward pass"])
def test_state_gates_and_products_are_float32(tiny_model, seen, precision, options):
    model, context = in_precision(tiny_model, precision, recompute_chunks=2, **options)
    cache = HopeCache(model.config)
    with context:
        out = model(text(2, 21), labels=text(2, 21), cache=cache)
    assert seen.keys() == {"inputs", "memories", "products", "reads", "state"}
    # chunks are computed once more in the backward pass, outside of the context as a rule
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast in the backward pass"):
        out.loss.backward()
    assert set().union(*seen.values()) == {torch.float32}, seen
    held = named_tensors(cache.layers[0].state)
    assert {name for name, tensor in held.items() if tensor.is_floating_point()} >= {"conv_tail", "current.0"}
    assert {tensor.dtype for tensor in held.values() if tensor.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
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


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
def test_linear_maps_that_torch_quantises_read_almost_the_same(tiny_model, options):
    """The weight of such a map is a function."""
    model, ids = tiny_model(**options), text(2, 21)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    plain, logits = model(ids).logits, small(ids).logits
    assert 0 < (logits - plain).abs().max() < 0.05 * plain.abs().max()


def initial_loss(model, ids):
    with torch.no_grad():
        return model(ids, labels=ids).loss.item()


@pytest.mark.parametrize(
    "config",
    [
        dict(vocab_size=4096, hidden_size=256, num_hidden_layers=4),
        dict(vocab_size=32000, hidden_size=1536, num_hidden_layers=1),
        dict(vocab_size=32000, hidden_size=1536, num_hidden_layers=1, tie_word_embeddings=True),
        dict(vocab_size=4096, hidden_size=256, num_hidden_layers=2, **HYBRID),
        dict(vocab_size=4096, hidden_size=256, num_hidden_layers=2, **ATTENTION),
    ],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
def test_loss_at_initialisation_is_that_of_a_uniform_guess(config):
    torch.manual_seed(0)
    model = HopeForCausalLM(HopeConfig(**config))
    ids = text(8, 128, vocab_size=config["vocab_size"])
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


@pytest.mark.parametrize(("kind", "options"), [("full_attention", {}), ("window_attention", {"sliding_window": 64})])
def test_a_cast_model_keeps_its_rotary_frequencies(tiny_model, tmp_path, kind, options):
    """As the same weights loaded in that dtype have them; Llama differs by 0.4 in the logits of 2,000 tokens."""
    model = tiny_model(layer_types=[kind], num_hidden_layers=1, **options)
    exact = model.model.rotary_emb.inv_freq.clone()
    model.save_pretrained(tmp_path)
    loaded = HopeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cast = model.to(torch.bfloat16)
    assert torch.equal(cast.model.rotary_emb.inv_freq, exact)
    ids = text(1, 300)
    assert torch.equal(cast(ids).logits, loaded(ids).logits)
    # and back: nothing was rounded on the way
    assert torch.equal(cast.float().model.rotary_emb.inv_freq, exact)
