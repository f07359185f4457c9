"""The loss without whole logits against the plain one: values, gradients, dtypes, memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hope_hf.model.loss import IGNORED, linear_cross_entropy

WIDTH, VOCABULARY = 8, 40


def problem(tokens=21, dtype=torch.float64, ignored=(0, 9, 20)):
    """Tokens that fill no whole number of chunks."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    labels[list(ignored)] = IGNORED
    return hidden, weight, labels


def plain(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED, reduction="sum")


def gradients(loss, *leaves, scale=0.37):
    return torch.autograd.grad(loss * scale, leaves)


@pytest.mark.parametrize("tokens", [1, 7, 8, 9, 21])
def test_loss_and_gradients_are_those_of_whole_logits(tokens):
    hidden, weight, labels = problem(tokens, ignored=(0,) if tokens > 1 else ())
    ours, theirs = linear_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0)
    expected = gradients(theirs, hidden, weight)
    torch.testing.assert_close(gradients(ours, hidden, weight), expected, rtol=1e-12, atol=1e-12)


def test_logits_far_apart_overflow_nowhere():
    hidden, weight, labels = problem(dtype=torch.float32)
    hidden = (hidden.detach() * 1e4).requires_grad_()
    ours, theirs = linear_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(gradients(ours, hidden, weight), gradients(theirs, hidden, weight))


@pytest.mark.parametrize("frozen", [0, 1])
def test_one_of_both_is_frozen(frozen):
    hidden, weight, labels = problem()
    (hidden, weight)[frozen].requires_grad_(False)
    trained = (hidden, weight)[1 - frozen]
    ours, theirs = linear_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels)
    torch.testing.assert_close(gradients(ours, trained), gradients(theirs, trained), rtol=1e-12, atol=1e-12)


def test_nothing_is_scored():
    hidden, weight, _ = problem()
    loss = linear_cross_entropy(hidden, weight, torch.full((21,), IGNORED))
    assert loss == 0 and all(not gradient.any() for gradient in gradients(loss, hidden, weight))


@pytest.mark.parametrize("count", [{}, {"num_items_in_batch": torch.tensor(0)}], ids=["mean", "of-0"])
def test_a_batch_without_labels_has_no_gradient(tiny_model, count):
    """As without `skip_logits`: the loss is nan, and an optimizer's step keeps the weights."""
    model = tiny_model().train()
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    for options in ({}, {"skip_logits": True}):
        model.zero_grad()
        loss = model(ids, labels=torch.full_like(ids, IGNORED), **count, **options).loss
        loss.backward()
        assert loss.isnan()
        assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)


def test_an_ignored_token_may_be_infinite():
    hidden, weight, labels = problem()
    with torch.no_grad():
        hidden[9] = float("inf")
    loss = linear_cross_entropy(hidden, weight, labels)
    grad_hidden, _ = gradients(loss, hidden, weight)
    assert loss.isfinite() and grad_hidden.isfinite().all() and not grad_hidden[9].any()


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_reaches_the_gradients(scale):
    """Loss scaling sees an overflow by them."""
    hidden, weight, labels = problem(dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    assert not any(gradient.isfinite().all() for gradient in gradients(loss, hidden, weight, scale=scale))


def test_a_second_backward_pass_gives_the_same():
    hidden, weight, labels = problem()
    loss = linear_cross_entropy(hidden, weight, labels)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden, weight)), first, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_low_precision_rounds_as_the_plain_loss_does(dtype, how):
    hidden, weight, labels = problem(300, torch.float32 if how == "autocast" else dtype, ignored=(3,))
    with torch.autocast("cpu", dtype, enabled=how == "autocast"):
        ours, theirs = linear_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels)
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for mine, other in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        assert mine.dtype == other.dtype
        assert (mine - other).norm() <= 0.01 * other.norm()


class Largest(TorchDispatchMode):
    """The most elements that any tensor had."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for part in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(part, torch.Tensor):
                self.elements = max(self.elements, part.numel())
        return result


@pytest.mark.parametrize("skip_logits", [True, False])
def test_logits_of_a_text_are_never_whole(tiny_model, skip_logits):
    model = tiny_model(vocab_size=1000).train()
    input_ids = torch.randint(1000, (2, 128))
    with Largest() as largest:
        model(input_ids, labels=input_ids, skip_logits=skip_logits, use_cache=False).loss.backward()
    logits = 2 * 128 * 1000
    assert (largest.elements < logits / 4) == skip_logits


def test_nothing_is_differentiated_where_no_gradient_is_wanted():
    hidden, weight, labels = problem()
    with torch.no_grad(), Largest() as largest:
        loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.grad_fn is None and largest.elements == WIDTH * VOCABULARY


OPTIONS = {
    "mean": {},
    "items": {"num_items_in_batch": 7},
    "tensor of items": {"num_items_in_batch": torch.tensor(7)},
    "documents": {"position_ids": torch.cat([torch.arange(5), torch.arange(8)]).expand(2, -1)},
    "shifted": {"shift_labels": torch.arange(26).view(2, 13)},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_model_gives_the_same_loss_without_logits(tiny_model, options):
    input_ids = torch.randint(64, (2, 13))
    labels = input_ids.clone()
    labels[0, :4] = IGNORED
    losses, grads = [], []
    for skip_logits in (True, False):
        model = tiny_model(torch.float64)
        out = model(input_ids, labels=labels, skip_logits=skip_logits, **options)
        out.loss.backward()
        assert (out.logits is None) == skip_logits
        losses.append(out.loss)
        grads.append([parameter.grad for parameter in model.parameters()])
    # the plain loss is float32
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0, check_dtype=False)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-7)


def test_a_head_that_is_replaced_makes_the_loss_from_logits(tiny_model):
    model = tiny_model()
    expected = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss
    head = nn.Linear(*reversed(model.lm_head.weight.shape), bias=False)
    head.weight = model.lm_head.weight
    model.lm_head = head
    out = model(torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]]), skip_logits=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected)


class LinearMap(torch.Tensor):
    """A quantised weight: of all products it knows a linear map alone."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.linear:
            raise NotImplementedError(function)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def test_a_quantised_head_makes_the_loss_from_logits(tiny_model):
    model, ids = tiny_model(), torch.arange(22).view(2, 11)
    expected = model(ids, labels=ids).loss
    model.lm_head._parameters["weight"] = model.lm_head.weight.detach().as_subclass(LinearMap)
    out = model(ids, labels=ids, skip_logits=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, expected)


def test_a_loss_alone_needs_labels(tiny_model):
    with pytest.raises(ValueError, match="skip_logits=True returns the loss alone: give labels, or leave skip_logits"):
        tiny_model()(torch.tensor([[1, 2, 3]]), skip_logits=True)
