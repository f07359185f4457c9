"""Training through what levels learn from a text, against the equations unrolled by hand in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from learning_models import ALL, LAYERS, TEACHES, one_level, random_ids
from mixers import HYBRID, WINDOW
from torch.func import functional_call

from hope_hf import HopeCache
from hope_hf.common.recompute import Recomputed, recompute_activations

RATES = TEACHES | dict(learned_rate=True)


def trained_model(tiny_model, rule, **options):
    """A model in training mode; learned rates away from their start."""
    model = one_level(tiny_model, learning=rule, **options).train()
    for name, parameter in model.named_parameters():
        if ".rates." in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return model


def factored(gradient):
    """G_ij / sqrt(r_i c_j / mean(r)), then an RMS of at most 1."""
    rows, columns = gradient.square().mean(1), gradient.square().mean(0)
    even = gradient / (rows[:, None] * columns / rows.mean()).sqrt()
    return even / even.square().mean().sqrt().clamp_min(1.0)


def unrolled_loss(model, ids, begins=(0,)):
    """Summed loss of one row [T], in whose columns `begins` documents begin, with the graph of all steps.

    Each document of a piece is read on its own: the first with what it has taught so far, others with the weights
    alone. The last one teaches.
    """
    config = model.config
    learning = config.level_learning.resolved(config)
    parameters = dict(model.named_parameters())
    keys = [
        (f"model.layers.{block}.continuum.levels.0", at, matrix)
        for block in learning.blocks
        for at, matrix in enumerate(learning.matrices)
    ]
    names = [f"{level}.{matrix}.weight" for level, _, matrix in keys]
    differences, cache, total = {}, None, 0.0
    targets = F.pad(ids[1:], (0, 1), value=-100)
    period = learning.periods[0]
    for start in range(0, len(ids), period):
        stop = min(start + period, len(ids))
        cuts = sorted({start, stop} | {column for column in begins if start < column < stop})
        for first, last in zip(cuts, cuts[1:], strict=False):
            if first in begins:
                cache, differences = HopeCache(config), dict.fromkeys(names, 0.0)
            moved = {name: parameters[name] + differences[name] for name in names}
            arguments = dict(cache=cache)
            logits = functional_call(model, parameters | moved, (ids[None, first:last],), arguments).logits[0]
            total = total + F.cross_entropy(logits, targets[first:last], reduction="sum", ignore_index=-100)
        if last - first < 2 or stop - start < period:
            continue
        inner = F.cross_entropy(logits[:-1], ids[first + 1 : last])
        gradients = torch.autograd.grad(inner, list(moved.values()), retain_graph=True)
        strength = min(1.0, inner.item() / (learning.brake * math.log(config.vocab_size))) if learning.brake else 1.0
        for (level, at, _), name, gradient in zip(keys, names, gradients, strict=True):
            weight = parameters[name].detach()
            size = learning.rate * weight.square().mean().sqrt() * strength
            if learning.learned_rate:
                size = size * parameters[f"{level}.rates.weight"][at].exp()
            difference = differences[name] - size * factored(gradient)
            bound = learning.drift * weight.norm() / difference.norm()
            differences[name] = difference * bound if bound < 1 else difference
    return total


def gradients_of(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def compare(model, ids, begins=None, **arguments):
    """Loss and gradients of the model and of the unrolled equations; the gradients."""
    begins = begins or [(0,)] * len(ids)
    unrolled = sum(unrolled_loss(model, row, own) for row, own in zip(ids, begins, strict=True))
    expected = gradients_of(model, unrolled / 10)
    out = model(ids, labels=ids, learn=True, num_items_in_batch=10, **arguments)
    torch.testing.assert_close(out.loss.detach(), unrolled.detach() / 10, rtol=1e-9, atol=1e-9)
    found = gradients_of(model, out.loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    return found


RULES = {
    "plain": TEACHES,
    "rates": RATES,
    # some steps reach the bound and some do not
    "drift": RATES | dict(drift=0.35),
    "brake": RATES | dict(brake=2.0),
    "matrices": RATES | dict(matrices=ALL, blocks=[0, 2], rate=0.03),
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_gradients_equal_the_unrolled_equations(tiny_model, options):
    model = trained_model(tiny_model, RATES, **options)
    compare(model, random_ids(2, 29))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_gradients_of_every_rule_equal_the_unrolled_equations(tiny_model, monkeypatch, rule):
    monkeypatch.setenv("HOPE_KERNELS", "plain")
    model = trained_model(tiny_model, rule)
    found = compare(model, random_ids(2, 37))
    rates = [gradient for name, gradient in found.items() if ".rates." in name]
    assert len(rates) == (len(rule.get("blocks", [2])) if rule.get("learned_rate") else 0)
    assert all((gradient != 0).all() for gradient in rates)


BEGINS = {
    "within-a-piece": [(0, 13), (0,)],
    "at-a-cut": [(0, 16), (0, 8, 24)],
    "several-in-a-piece": [(0, 9, 12, 30), (0, 3, 5)],
    # a document's last or only token of a piece
    "one-token": [(0, 15, 16), (0, 23)],
}


@pytest.mark.parametrize("options", [{}, WINDOW], ids=["memory", "window"])
@pytest.mark.parametrize("begins", BEGINS.values(), ids=BEGINS)
def test_documents_of_a_row_do_not_teach_each_other(tiny_model, options, begins):
    model, ids = trained_model(tiny_model, RATES | dict(drift=0.35), **options), random_ids(2, 37)
    positions = torch.stack([positions_of(own, 37) for own in begins])
    compare(model, ids, begins=begins, position_ids=positions)


def positions_of(begins, length):
    column = torch.arange(length)
    return column - torch.tensor([max(start for start in begins if start <= at) for at in range(length)])


@pytest.mark.parametrize("begin, steps", [(13, 4), (16, 3)])
def test_a_new_document_does_not_shift_where_the_row_is_cut(tiny_model, begin, steps):
    model, ids = one_level(tiny_model), random_ids(1, 41)
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(ids, position_ids=positions_of((0, begin), 41)[None], cache=cache, learn=True)
    # the steps that the last document has taken, at every eighth column of the row
    assert cache.levels.tokens.tolist() == [41] and cache.levels.steps.tolist() == [[steps]]


def test_a_document_is_read_in_a_row_as_alone(tiny_model):
    """Without gradients too: the second document begins at a cut, so that its pieces are those of a row of its own."""
    model, ids = one_level(tiny_model), random_ids(1, 40)
    cache, alone = HopeCache(model.config), HopeCache(model.config)
    with torch.no_grad():
        logits = model(ids, position_ids=positions_of((0, 16), 40)[None], cache=cache, learn=True).logits
        expected = model(ids[:, 16:], cache=alone, learn=True).logits
    torch.testing.assert_close(logits[:, 16:], expected)
    for key, delta in alone.levels.deltas.items():
        torch.testing.assert_close(cache.levels.deltas[key], delta)


@pytest.mark.parametrize("options", [{}, HYBRID], ids=["memory", "hybrid"])
def test_recomputed_blocks_have_the_same_gradients(tiny_model, options):
    model, ids = trained_model(tiny_model, RATES, **options), random_ids(2, 37)
    positions = {} if options is HYBRID else dict(position_ids=positions_of((0, 13), 37)[None])
    expected = gradients_of(model, model(ids, labels=ids, learn=True, use_cache=False, **positions).loss)
    recompute_activations(model, Recomputed("block"))
    found = gradients_of(model, model(ids, labels=ids, learn=True, use_cache=False, **positions).loss)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12)


def test_learned_rates_change_nothing_at_their_start_and_are_used_in_reading(tiny_model):
    ids = random_ids(1, 40)
    plain, model = one_level(tiny_model), one_level(tiny_model, learning=RATES)
    assert not [name for name, _ in plain.named_parameters() if ".rates." in name]
    assert [name for name, _ in model.named_parameters() if ".rates." in name] == [
        "model.layers.2.continuum.levels.0.rates.weight"
    ]
    model.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        expected = plain(ids, learn=True).logits
        torch.testing.assert_close(model(ids, learn=True).logits, expected, rtol=0, atol=0)
        model.model.layers[2].continuum.levels[0].rates.weight.fill_(math.log(0.5))
        plain.config.level_learning.rate /= 2
        torch.testing.assert_close(model(ids, learn=True).logits, plain(ids, learn=True).logits)


def test_what_is_not_kept_is_not_learned_from_the_last_piece(tiny_model):
    model, ids = trained_model(tiny_model, RATES), random_ids(2, 37)
    calls = []
    original = torch.autograd.grad

    def counting(*args, **kwargs):
        calls.append(None)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", counting)
        model(ids, labels=ids, learn=True, use_cache=False)
        assert len(calls) == 4
        model(ids, labels=ids, learn=True)
        assert len(calls) == 9
        # the last piece is whole
        model(ids[:, :32], labels=ids[:, :32], learn=True, use_cache=False)
    assert len(calls) == 12


def test_training_that_cannot_be_is_refused(tiny_model, monkeypatch):
    model, ids = trained_model(tiny_model, RATES), random_ids(1, 20)
    hybrid = trained_model(tiny_model, RATES, **HYBRID)
    with pytest.raises(ValueError, match="give every document a row of its own"):
        hybrid(ids, labels=ids, learn=True, position_ids=positions_of((0, 9), 20)[None])
    with pytest.raises(ValueError, match="without padding: leave attention_mask out"):
        mask = torch.tensor([[0] * 4 + [1] * 16])
        model(ids, labels=ids, learn=True, position_ids=positions_of((0, 9), 20)[None], attention_mask=mask)
