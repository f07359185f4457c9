"""The loss without whole logits against the plain one: values, gradients, dtypes, memory."""

import pytest
import torch
import torch.nn.functional as F
from mixers import LargestTensor
from torch import nn

from hope_hf import HopeCache
from hope_hf.model.loss import IGNORED, linear_cross_entropy

WIDTH, VOCABULARY = 8, 40


def problem(tokens=21, dtype=torch.float64, ignored=(0, 9, 20), scale=1.0):
    """Tokens that fill no whole number of chunks."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(rows, WIDTH, generator=generator).double() for rows in (tokens, VOCABULARY))
    labels = torch.randint(VOCABULARY, (tokens,), generator=generator)
    labels[list(ignored)] = IGNORED
    return (hidden * scale).to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels


def plain(hidden, weight, labels):
    logits = F.linear(hidden, weight)
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels, ignore_index=IGNORED, reduction="sum")


def gradients(loss, *leaves, scale=0.37):
    return torch.autograd.grad(loss * scale, leaves, retain_graph=True)


PROBLEMS = {
    "one token": dict(tokens=1, ignored=()),
    "a chunk": dict(tokens=8, ignored=(0,)),
    "chunks and a rest": {},
    "logits far apart": dict(scale=1e4, dtype=torch.float32),
    "nothing is scored": dict(ignored=range(21)),
}


@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS)
def test_loss_and_gradients_are_those_of_whole_logits(options):
    hidden, weight, labels = problem(**options)
    close = {} if hidden.dtype == torch.float32 else dict(rtol=1e-12, atol=1e-12)
    ours, theirs = linear_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels)
    torch.testing.assert_close(ours, theirs, **close)
    expected = gradients(theirs, hidden, weight)
    # a second backward pass gives the same
    for _ in range(2):
        torch.testing.assert_close(gradients(ours, hidden, weight), expected, **close)
    for frozen, trained, index in ((hidden, weight, 1), (weight, hidden, 0)):
        frozen.requires_grad_(False)
        found = gradients(linear_cross_entropy(hidden, weight, labels), trained)
        torch.testing.assert_close(found[0], expected[index], **close)
        frozen.requires_grad_(True)


@pytest.mark.parametrize("options", [{}, {"skip_logits": True}, {"learn": True}], ids=str)
def test_another_label_may_be_ignored(tiny_model, options):
    """As in transformers' `loss_function`."""
    model = tiny_model(level_learning={})
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.masked_fill(torch.arange(12) % 3 == 0, -1)
    with torch.no_grad():
        expected = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-1)
        loss = model(ids, labels=labels, ignore_index=-1, **options).loss
        torch.testing.assert_close(loss, expected)
        if "learn" in options:
            with pytest.raises(ValueError, match="learn=True.*shift_labels"):
                model(ids, labels=ids, shift_labels=ids, **options)


def test_a_loss_of_the_users_own_gets_the_logits(tiny_model):
    model, ids = tiny_model(), torch.arange(18).view(2, 9)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    out = model(ids, labels=ids, skip_logits=True)
    assert out.logits is None
    torch.testing.assert_close(out.loss, model(ids).logits.square().mean())


def test_a_penalty_on_a_gradient_is_learned_or_refused(tiny_model, monkeypatch):
    """Nothing of the second derivative is left out in silence."""
    ids = torch.arange(18).view(2, 9)

    def penalty(model, loss):
        (gradient,) = torch.autograd.grad(loss, model.lm_head.weight, create_graph=True)
        return gradient.square().sum()

    fast = tiny_model(torch.float64)
    loss = fast(ids, labels=ids, skip_logits=True).loss
    with pytest.raises(ValueError, match="HOPE_KERNELS=plain"):
        penalty(fast, loss).backward()
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    model = tiny_model(torch.float64)
    weight = model.lm_head.weight
    whole = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    losses = whole, model(ids, labels=ids, skip_logits=True).loss
    expected, found = (torch.autograd.grad(penalty(model, loss), weight) for loss in losses)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{}, {"skip_logits": True}], ids=["logits", "no logits"])
def test_a_batch_without_labels_has_no_gradient(tiny_model, options):
    """The loss is nan, and an optimizer's step keeps the weights."""
    model = tiny_model().train()
    ids = torch.arange(18).view(2, 9)
    loss = model(ids, labels=torch.full_like(ids, IGNORED), **options).loss
    loss.backward()
    assert loss.isnan()
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)


def test_a_scale_that_is_not_finite_reaches_the_gradients():
    """Loss scaling sees an overflow by them."""
    hidden, weight, labels = problem(dtype=torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    for gradient in gradients(loss, hidden, weight, scale=float("inf")):
        assert not gradient.isfinite().all()


@pytest.mark.parametrize("dtype, is_autocast", [(torch.bfloat16, True), (torch.float16, False)])
def test_low_precision_rounds_as_the_plain_loss_does(dtype, is_autocast):
    hidden, weight, labels = problem(300, torch.float32 if is_autocast else dtype, ignored=(3,))
    with torch.autocast("cpu", dtype, enabled=is_autocast):
        ours, theirs = linear_cross_entropy(hidden, weight, labels), plain(hidden, weight, labels)
    assert ours.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    for mine, other in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        assert mine.dtype == other.dtype and (mine - other).norm() <= 0.01 * other.norm()


@pytest.mark.parametrize("skip_logits", [True, False])
def test_logits_of_a_text_are_never_whole(tiny_model, skip_logits):
    model = tiny_model(vocab_size=1000).train()
    input_ids = torch.randint(1000, (2, 128))
    with LargestTensor() as largest:
        model(input_ids, labels=input_ids, skip_logits=skip_logits, use_cache=False).loss.backward()
    assert (largest.size < 2 * 128 * 1000 / 4) == skip_logits


def test_nothing_is_differentiated_where_no_gradient_is_wanted():
    hidden, weight, labels = problem()
    with torch.no_grad(), LargestTensor() as largest:
        loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.grad_fn is None and largest.size == WIDTH * VOCABULARY


OPTIONS = {
    "mean": {},
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


class LinearMap(torch.Tensor):
    """A quantised weight: of all products it knows a linear map alone."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function is not F.linear:
            raise NotImplementedError(function)
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **kwargs or {})


def test_another_head_makes_the_loss_from_logits(tiny_model):
    model, ids = tiny_model(), torch.arange(22).view(2, 11)
    expected = model(ids, labels=ids).loss
    quantised = model.lm_head.weight.detach().as_subclass(LinearMap)
    replaced = nn.Linear(32, 64, bias=False)
    replaced.weight = model.lm_head.weight
    model.lm_head._parameters["weight"] = quantised
    torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, expected)
    model.lm_head = replaced
    torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, expected)


@pytest.mark.parametrize("learn", [False, True])
def test_the_head_of_a_sharded_model_makes_no_whole_logits(tiny_model, learn):
    """FSDP2 makes a subclass of every class of modules."""
    model = tiny_model(level_learning=dict(periods=[8, 8], gate=False))
    model.lm_head.__class__ = type("FSDPHopeHead", (type(model.lm_head),), {})
    given = []
    model.lm_head.register_forward_pre_hook(lambda head, inputs: given.append(len(inputs)))
    ids = torch.arange(16)[None]
    options = dict(cache=HopeCache(model.config), learn=True) if learn else {}
    model(ids, labels=ids, skip_logits=True, **options)
    # targets beside the hidden states
    assert given and min(given) > 1
