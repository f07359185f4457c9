"""What stays float32 in bfloat16, what the loss is at the start, and what it is divided by."""

import math

import pytest
import torch
import torch.nn.functional as F
from mixers import MEMORIES, MIXED, STATES
from torch.utils._python_dispatch import TorchDispatchMode

from hope_hf import HopeCache, HopeConfig, HopeForCausalLM


def text(*shape, vocab_size=64):
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(4))


def in_precision(tiny_model, precision, **options):
    """A model and the context in which it runs; the weights are the same up to rounding."""
    model = tiny_model(torch.bfloat16 if precision == "bfloat16" else torch.float32, **options)
    return model, torch.autocast("cpu", torch.bfloat16, enabled=precision.startswith("autocast"))


class Products(TorchDispatchMode):
    """Dtypes of the operands of batched products and solves, as they are after autocast."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("bmm", "baddbmm", "baddbmm_", "linalg_solve_triangular"):
            operands = [part for part in args[:3] if torch.is_tensor(part)]
            self.dtypes.setdefault(name.rstrip("_"), set()).update(part.dtype for part in operands)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("precision", ["autocast", "bfloat16", "autocast in the backward pass"])
def test_products_and_states_of_memories_are_float32(tiny_model, precision, kind):
    model, context = in_precision(tiny_model, precision, recompute_chunks=2, **MEMORIES[kind])
    cache = HopeCache(model.config)
    with Products() as seen:
        with context:
            out = model(text(2, 21), labels=text(2, 21), cache=cache)
        # chunks are computed once more in the backward pass, outside of the context as a rule
        # by hand; autograd would round the products of the paper's rule
        within = precision == "autocast in the backward pass" and "delta" in kind
        with torch.autocast("cpu", torch.bfloat16, enabled=within):
            out.loss.backward()
    assert "bmm" in seen.dtypes and set().union(*seen.dtypes.values()) == {torch.float32}, seen.dtypes
    held = [tensor for tensor in cache.state_tensors().values() if tensor.is_floating_point()]
    assert held and {tensor.dtype for tensor in held} == {torch.float32}


@pytest.mark.parametrize("options", (MEMORIES | STATES).values(), ids=MEMORIES | STATES)
@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_loss_and_gradients_stay_close_to_those_of_float32(tiny_model, precision, options):
    losses, gradients = [], []
    for name in ("float32", precision):
        model, context = in_precision(tiny_model, name, **options)
        with context:
            out = model(text(2, 40), labels=text(2, 40))
        assert out.logits.dtype == (torch.float32 if name == "float32" else torch.bfloat16)
        out.loss.backward()
        losses.append(out.loss)
        gradients.append({name: parameter.grad.float() for name, parameter in model.named_parameters()})
    assert losses[0].dtype == losses[1].dtype == torch.float32
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=5e-3)
    for name, gradient in gradients[1].items():
        assert gradient.isfinite().all() and gradient.abs().max() > 0, name
    # the direction of the whole gradient
    whole = (torch.cat([gradient.flatten() for gradient in each.values()]) for each in gradients)
    assert F.cosine_similarity(*whole, dim=0) > 0.99


@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor")
def test_linear_maps_that_torch_quantises_read_almost_the_same(tiny_model):
    """The weight of such a map is a function."""
    model, ids = tiny_model(**MIXED), text(2, 21)
    small = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    plain, logits = model(ids).logits, small(ids).logits
    assert 0 < (logits - plain).abs().max() < 0.05 * plain.abs().max()


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    [
        dict(vocab_size=4096, hidden_size=256, num_hidden_layers=4, layer_types=["hope_memory", "full_attention"] * 2),
        dict(vocab_size=16000, hidden_size=1536, num_hidden_layers=1, tie_word_embeddings=True),
    ],
    ids=["hybrid", "wide and tied"],
)
def test_loss_at_initialisation_is_that_of_a_uniform_guess(config):
    torch.manual_seed(0)
    ids = text(4, 128, vocab_size=config["vocab_size"])
    loss = HopeForCausalLM(HopeConfig(**config))(ids, labels=ids).loss.item()
    assert loss == pytest.approx(math.log(config["vocab_size"]), rel=0.02)


def test_loss_is_the_mean_over_scored_next_tokens_or_over_the_number_given(tiny_model):
    """So micro-batches with unequal numbers of scored tokens add up to the loss of the whole batch."""
    model, ids = tiny_model(torch.float64), text(4, 12)
    labels = ids.clone()
    labels[0, :9], labels[3, 4:], labels[2] = -100, -100, -100
    out = model(ids, labels=labels)
    scored = (labels[:, 1:] != -100).nonzero()
    losses = [-out.logits[row, at].log_softmax(-1)[ids[row, at + 1]] for row, at in scored]
    assert out.loss.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-6)
    out.loss.backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    total = 0.0
    for rows, items in ((slice(0, 1), len(scored)), (slice(1, 4), torch.tensor(len(scored)))):
        loss = model(ids[rows], labels=labels[rows], num_items_in_batch=items).loss
        loss.backward()
        total += loss.item()
    assert total == pytest.approx(out.loss.item(), rel=1e-6)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize(("kind", "options"), [("full_attention", {}), ("window_attention", {"sliding_window": 64})])
def test_a_cast_model_keeps_its_rotary_frequencies(tiny_model, tmp_path, kind, options):
    """As the same weights loaded in that dtype have them; Llama differs by 0.4 in the logits of 2,000 tokens."""
    model = tiny_model(layer_types=[kind], num_hidden_layers=1, **options)
    exact = model.model.rotary_emb.inv_freq.clone()
    model.save_pretrained(tmp_path)
    loaded = HopeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    cast = model.to(torch.bfloat16)
    ids = text(1, 300)
    assert torch.equal(cast.model.rotary_emb.inv_freq, exact) and torch.equal(cast(ids).logits, loaded(ids).logits)
    # and back: nothing was rounded on the way
    assert torch.equal(cast.float().model.rotary_emb.inv_freq, exact)
