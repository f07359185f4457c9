"""Levels that learn while reading: against the equations piece by piece in float64, and as a state of the cache."""

import copy
import math
from itertools import pairwise, product

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from learning_models import ALL, STATES, TEACHES, one_level, random_ids
from mixers import ATTENTION, HYBRID, MIXED, WINDOW
from peft import LoraConfig, get_peft_model
from torch.func import functional_call
from transformers import StoppingCriteria
from transformers.utils import logging

from hope_hf import HopeCache, HopeConfig, LevelLearning
from hope_hf.model import cache_file
from hope_hf.model.level_learning import normalised


def read(model, ids, cache=None, **arguments):
    """The logits of a text that the levels learn from, and the cache."""
    cache = HopeCache(model.config) if cache is None else cache
    with torch.no_grad():
        return model(ids, cache=cache, learn=True, **arguments).logits, cache


def deltas(cache, rows=slice(None)):
    return {str(key): delta[rows] for key, delta in cache.levels.deltas.items()}


EXACT, SAME = dict(rtol=1e-9, atol=1e-9), dict(rtol=0, atol=0)


def factored(gradient):
    """Entry by entry: G_ij / sqrt(r_i c_j / mean(r)), then an RMS of at most 1."""
    rows = [sum(g * g for g in row) / len(row) for row in gradient.tolist()]
    columns = [sum(g * g for g in column) / len(column) for column in gradient.mT.tolist()]
    mean = sum(rows) / len(rows)
    scale = torch.tensor([[math.sqrt(r * c / mean) if r * c else math.inf for c in columns] for r in rows])
    even = gradient / scale.double()
    return even / max(1.0, even.square().mean().sqrt().item())


def twin(model, ids, learning: LevelLearning):
    """Logits [T, V] of one text [T], and the final differences by name, as in the equations.

    Every piece is read from the states that the pieces before it left, with weights `W + D`. The loss is computed from
    logits. Periods of slower levels sum the gradients of their pieces.
    """
    config = model.config
    learning = learning.resolved(config)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    names = {
        f"model.layers.{block}.continuum.levels.{level}.{matrix}.weight": level
        for block in learning.blocks
        for level in range(len(config.level_periods))
        for matrix in learning.matrices
    }
    differences = {name: torch.zeros_like(weights[name]) for name in names}
    sums = {name: torch.zeros_like(weights[name]) for name in names}
    losses, counts = [0.0] * len(learning.periods), [0] * len(learning.periods)
    cache, logits = HopeCache(config), []
    for piece in ids.split(learning.periods[0]):
        moved = {name: (weights[name] + differences[name]).requires_grad_() for name in names}
        out = functional_call(model, weights | moved, (piece[None],), dict(cache=cache)).logits[0]
        logits.append(out.detach())
        cache.detach_()
        loss = F.cross_entropy(out[:-1], piece[1:], reduction="sum")
        if len(piece) > 1:
            gradients = torch.autograd.grad(loss, list(moved.values()))
            for name, gradient in zip(moved, gradients, strict=True):
                sums[name] += gradient
        for level, period in enumerate(learning.periods):
            losses[level] += loss.item()
            counts[level] += len(piece) - 1
            if sum(map(len, logits)) % period:
                continue
            mean, guess = losses[level] / counts[level], math.log(config.vocab_size)
            strength = min(1.0, mean / (learning.brake * guess)) if learning.brake else 1.0
            if learning.gate and mean > guess:
                strength = 0.0
            for name in (name for name, own in names.items() if own == level):
                if strength:
                    weight = weights[name]
                    step = learning.rate * weight.square().mean().sqrt() * strength * factored(sums[name])
                    differences[name] = differences[name] - step
                    drift = differences[name].norm() / weight.norm()
                    if drift > learning.drift:
                        differences[name] = differences[name] * learning.drift / drift
                sums[name] = torch.zeros_like(sums[name])
            losses[level], counts[level] = 0.0, 0
    return torch.cat(logits), {
        name.removeprefix("model.layers.").replace("continuum.levels.", "").removesuffix(".weight"): difference
        for name, difference in differences.items()
    }


RULES = {
    "plain": TEACHES,
    "drift": TEACHES | dict(drift=0.2),
    "gate": TEACHES | dict(gate=True),
    "brake": TEACHES | dict(brake=2.0),
    "brake that binds": TEACHES | dict(brake=0.1),
    # a smaller rate, since a column whose gradient nearly vanishes is normalised to noise
    "matrices": TEACHES | dict(matrices=ALL, blocks=[0, 2], rate=0.03),
}


@pytest.mark.parametrize("kind, rule", [*product(["memory"], RULES), ("attention", "drift"), ("mixed", "plain")])
def test_outputs_and_differences_equal_the_equations(tiny_model, kind, rule):
    model = one_level(tiny_model, learning=RULES[rule], **STATES[kind])
    ids = random_ids(2, 43)
    logits, cache = read(model, ids)
    assert cache.levels.steps.sum() + cache.levels.skipped.sum() == 2 * 5
    for row in range(2):
        expected = twin(model, ids[row], model.config.level_learning)
        torch.testing.assert_close((logits[row], deltas(cache, row)), expected, **EXACT)
    if rule == "plain":
        assert (logits - model(ids).logits)[:, 8:].abs().max() > 3e-3, "the levels have learned nothing"


@pytest.mark.parametrize("variant", ["sequential", "independent"])
def test_two_clocks_equal_the_equations(tiny_model, variant):
    rule = TEACHES | dict(periods=[4, 12], blocks=[1, 2])
    sizes = dict(level_periods=[1, 1], level_intermediate_sizes=[24, 16], level_variant=variant)
    model = one_level(tiny_model, learning=rule, **sizes, **HYBRID)
    ids = random_ids(1, 30)
    logits, cache = read(model, ids)
    assert cache.levels.steps.tolist() == [[7, 2]]
    expected = twin(model, ids[0], model.config.level_learning)
    torch.testing.assert_close((logits[0], deltas(cache, 0)), expected, **EXACT)


def test_a_zero_gradient_and_a_tiny_one_are_normalised_without_nan():
    gradient = torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(0))
    gradient[:, 2] = 0.0
    even = normalised(gradient)
    assert even.isfinite().all() and not even[:, 2].any()
    torch.testing.assert_close(normalised(gradient * 1e-12), even)
    torch.testing.assert_close(even[0].double(), factored(gradient[0].double()), rtol=1e-5, atol=1e-6)
    assert not normalised(torch.zeros(1, 3, 3)).any()


def test_a_text_cut_at_periods_reads_and_teaches_the_same(tiny_model):
    model, ids = one_level(tiny_model, **MIXED), random_ids(2, 40)
    whole, once = read(model, ids)
    cache = HopeCache(model.config)
    parts = [read(model, part, cache)[0] for part in ids.split([16, 8, 16], dim=1)]
    torch.testing.assert_close((torch.cat(parts, dim=1), deltas(cache)), (whole, deltas(once)), **SAME)


def test_a_text_cut_elsewhere_teaches_nearly_the_same_at_the_same_tokens(tiny_model):
    """Only predictions across the cut, and the gradient through keys and values of the call before, are missing."""
    model, ids = one_level(tiny_model, **ATTENTION), random_ids(1, 40)
    _, once = read(model, ids)
    cache = HopeCache(model.config)
    for part in ids.split([13, 27], dim=1):
        read(model, part, cache)
    assert cache.levels.steps.tolist() == once.levels.steps.tolist() == [[5]]
    for name, delta in deltas(once).items():
        change = (deltas(cache)[name] - delta).norm() / delta.norm()
        assert 0 < change < 0.5


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_of_a_padded_batch_learn_as_if_alone(tiny_model, side):
    model = one_level(tiny_model, torch.float32, **MIXED)
    texts = [random_ids(1, length, seed=length) for length in (37, 21, 37)]
    ids, mask = torch.zeros(3, 37, dtype=torch.long), torch.zeros(3, 37, dtype=torch.long)
    for row, text in enumerate(texts):
        columns = slice(37 - text.shape[1], 37) if side == "left" else slice(0, text.shape[1])
        ids[row, columns], mask[row, columns] = text[0], 1
    logits, cache = read(model, ids, attention_mask=mask)
    assert cache.levels.tokens.tolist() == [37, 21, 37]
    for row, text in enumerate(texts):
        alone, own = read(model, text)
        found = logits[row, mask[row].bool()], deltas(cache, row)
        torch.testing.assert_close(found, (alone[0], deltas(own, 0)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["memory", "window"])
def test_documents_of_a_row_are_read_as_alone(tiny_model, kind):
    model, ids = one_level(tiny_model, **({} if kind == "memory" else WINDOW)), random_ids(2, 37)
    begins = [(0, 9, 12, 30), (0, 16)]
    positions = torch.stack([positions_of(own, 37) for own in begins])
    logits, cache = read(model, ids, position_ids=positions)
    for row, own in enumerate(begins):
        for first, last in pairwise([*own, 37]):
            expected, alone = read(model, ids[row : row + 1, first:last])
            torch.testing.assert_close(logits[row, first:last], expected[0])
        # what the last document has taught
        for key, delta in alone.levels.deltas.items():
            torch.testing.assert_close(cache.levels.deltas[key][row], delta[0])


def positions_of(begins, length):
    column = torch.arange(length)
    return column - torch.tensor([max(start for start in begins if start <= at) for at in range(length)])


def test_documents_that_cannot_be_kept_apart_are_refused(tiny_model):
    positions = positions_of((0, 9), 20)[None]
    with pytest.raises(ValueError, match="give every document a row of its own"):
        read(one_level(tiny_model, **HYBRID), random_ids(1, 20), position_ids=positions)
    mask = torch.tensor([[0] * 4 + [1] * 16])
    with pytest.raises(ValueError, match="leave attention_mask out"):
        read(one_level(tiny_model), random_ids(1, 20), position_ids=positions, attention_mask=mask)


def test_what_is_not_kept_is_not_learned_from_the_last_piece(tiny_model, monkeypatch):
    model, ids, calls, backward = one_level(tiny_model), random_ids(2, 37), [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: calls.append(None) or backward(*args))
    model(ids, learn=True, use_cache=False)
    assert len(calls) == 4
    loss = model(ids, labels=ids, learn=True).loss
    assert len(calls) == 9 and not loss.requires_grad


def test_labels_say_what_is_scored_and_learned(tiny_model):
    model, ids = one_level(tiny_model), random_ids(1, 32)
    labels = ids.clone()
    labels[:, 8:16] = -100
    cache = HopeCache(model.config)
    with torch.no_grad():
        out = model(ids, labels=labels, cache=cache, learn=True, logits_to_keep=3)
        again = model(ids, labels=labels, learn=True, skip_logits=True)
    logits, _ = read(model, ids, labels=labels)
    kept = labels[0, 1:] != -100
    expected = F.cross_entropy(logits[0, :-1][kept], ids[0, 1:][kept])
    torch.testing.assert_close(out.loss, expected)
    torch.testing.assert_close(again.loss, expected)
    assert again.logits is None
    torch.testing.assert_close(out.logits, logits[:, -3:])
    # the second period holds no label: it takes no step
    assert cache.levels.steps.tolist() == [[3]]


def test_a_rate_of_0_equals_the_frozen_model_bit_by_bit(tiny_model):
    model, ids = one_level(tiny_model, learning=TEACHES | dict(rate=0), **MIXED), random_ids(2, 40)
    logits, _ = read(model, ids)
    cache = HopeCache(model.config)
    with torch.no_grad():
        frozen = [model(part, cache=cache).logits for part in ids.split(8, dim=1)]
    assert torch.equal(logits, torch.cat(frozen, dim=1))


def test_weights_keep_their_bytes_and_two_caches_do_not_touch(tiny_model):
    model = one_level(tiny_model, torch.float32)
    before = copy.deepcopy(model.state_dict())
    plain, other = model(random_ids(1, 12)).logits, HopeCache(model.config)
    _, cache = read(model, random_ids(1, 40))
    with torch.no_grad():
        assert not torch.equal(model(random_ids(1, 12), cache=cache).logits, plain)
        assert torch.equal(model(random_ids(1, 12), cache=other).logits, plain)
    torch.testing.assert_close(model.state_dict(), before, **SAME)
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_a_step_with_a_number_that_is_not_finite_is_left_out(tiny_model, monkeypatch):
    model, ids = one_level(tiny_model), random_ids(2, 24)
    backward = torch.autograd.grad
    calls = []

    def broken(*args, **kwargs):
        gradients = backward(*args, **kwargs)
        calls.append(None)
        if len(calls) == 2:
            gradients[0][1, 0, 0] = math.inf
        return gradients

    monkeypatch.setattr(torch.autograd, "grad", broken)
    _, cache = read(model, ids)
    assert cache.levels.steps.tolist() == [[3], [2]]
    assert cache.levels.skipped.tolist() == [[[0, 0]], [[0, 1]]]
    assert all(delta.isfinite().all() for delta in deltas(cache).values())


def answers(model, cache, ids):
    """Logits of a fork of the cache."""
    return read(model, ids, copy.deepcopy(cache))[0]


def test_what_is_learned_forks_rolls_back_reorders_and_resets(tiny_model):
    model = one_level(tiny_model, **MIXED)
    ids, after = random_ids(3, 21), random_ids(3, 11, seed=2)
    _, cache = read(model, ids)
    before, expected = cache.snapshot(), answers(model, cache, after)
    read(model, random_ids(3, 30, seed=3), cache)
    assert not torch.allclose(answers(model, cache, after), expected)
    assert torch.equal(answers(model, cache.rollback(before), after), expected)
    for change, rows in (
        (lambda held: held.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda held: held.batch_select_indices(torch.tensor([1])), [1]),
        (lambda held: held.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        chosen = copy.deepcopy(cache)
        change(chosen)
        torch.testing.assert_close(answers(model, chosen, after[rows]), expected[rows])
    assert cache.level_bytes > 3 * 40 * 32 * 8
    cache.reset_levels()
    assert cache.level_bytes == 0 and cache.get_seq_length() == 21


def test_cropping_and_reading_without_learning_keep_what_was_learned(tiny_model):
    model = one_level(tiny_model, **ATTENTION)
    _, cache = read(model, random_ids(1, 8))
    learned = copy.deepcopy(deltas(cache))
    with torch.no_grad():
        model(random_ids(1, 12, seed=2), cache=cache)
    assert cache.levels.tokens.tolist() == [8]
    cache.crop(-7)
    assert cache.get_seq_length() == 13
    torch.testing.assert_close(deltas(cache), learned, **SAME)


def test_a_file_continues_in_every_precision(tiny_model, tmp_path):
    model = one_level(tiny_model, torch.float32, **HYBRID)
    _, cache = read(model, random_ids(2, 21))
    ids, sizes = random_ids(2, 30, seed=2), []
    expected, frozen = answers(model, cache, ids), answers(model, copy.deepcopy(cache).reset_levels(), ids)
    for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 1e-3), ("int8", 1e-3)):
        cache.save_pretrained(tmp_path / dtype, model, level_dtype=dtype)
        sizes.append((tmp_path / dtype / "hope_cache.safetensors").stat().st_size)
        loaded = HopeCache.from_pretrained(tmp_path / dtype, model)
        torch.testing.assert_close(read(model, ids, loaded)[0], expected, rtol=0, atol=tolerance)
    assert sizes[0] > sizes[1] > sizes[2]
    assert (frozen - expected).abs().max() > 5e-3, "what was learned makes no difference"


def test_int8_is_exact_to_a_part_of_each_row(tiny_model):
    """One factor for a whole matrix would lose its small rows."""
    _, cache = read(one_level(tiny_model), random_ids(1, 21))
    deltas = {
        key: delta * torch.logspace(-4, 0, delta.shape[1])[:, None] for key, delta in cache.levels.deltas.items()
    }
    stored = cache.levels._replace(deltas=deltas).named_tensors("int8")
    for key, delta in deltas.items():
        found = stored[f"deltas.{key}"] * stored[f"factors.deltas.{key}"]
        assert stored[f"deltas.{key}"].dtype == torch.int8
        assert ((found - delta).abs() <= delta.abs().amax(-1, keepdim=True) / 253).all()


def test_a_file_of_other_fields_is_refused(tiny_model, tmp_path):
    model = one_level(tiny_model, torch.float32)
    _, cache = read(model, random_ids(1, 21))
    cache.save_pretrained(tmp_path, model)
    others = {
        "level_learning": None,
        "`rate`.*0.3.*0.1": LevelLearning(**TEACHES | dict(rate=0.1)),
        "`matrices`": LevelLearning(**TEACHES | dict(matrices=ALL)),
    }
    for match, learning in others.items():
        with pytest.raises(ValueError, match=match):
            HopeCache.from_pretrained(tmp_path, one_level(tiny_model, torch.float32, learning=learning))
    with pytest.raises(ValueError, match="level_dtype.*int4"):
        cache.save_pretrained(tmp_path, model, level_dtype="int4")


# a tensor, its last value, and a word that the sentence has beside the tensor's name
WRONG_VALUES = [
    ("deltas.2.0.down_proj", math.nan, "NaN"),
    ("deltas.2.0.down_proj", 1e18, "`drift` 2.0"),
    ("deltas.2.0.down_proj", 30.0, "`drift` 2.0"),
    ("gradients.2.0.down_proj", math.inf, "infinity"),
    ("losses", math.nan, "NaN"),
    ("scored", -1, "negative"),
]


def test_a_file_of_what_no_text_teaches_is_refused(tiny_model, tmp_path, monkeypatch):
    model = one_level(tiny_model, torch.float32)
    _, cache = read(model, random_ids(2, 21))
    tensors = cache.state_tensors()
    monkeypatch.setattr(cache_file, "_stays_finite", lambda _: True)
    for name, value, word in WRONG_VALUES:
        forged = tensors[f"levels.{name}"].clone(memory_format=torch.contiguous_format)
        forged.flatten()[-1] = value
        # with a seal that fits, as a program would make it
        changed = tensors | {f"levels.{name}": forged}
        monkeypatch.setattr(cache, "state_tensors", lambda dtype, changed=changed: changed)
        cache.save_pretrained(tmp_path / "forged", model)
        with pytest.raises(ValueError, match=word):
            HopeCache.from_pretrained(tmp_path / "forged", model)


def test_a_cache_of_another_model_is_refused(tiny_model):
    model, wider = one_level(tiny_model), one_level(tiny_model, level_intermediate_sizes=[48])
    _, cache = read(model, random_ids(1, 21))
    with pytest.raises(ValueError, match="does not fit"):
        read(wider, random_ids(1, 9), cache)
    model.config.level_learning = TEACHES | dict(blocks=[0])
    with pytest.raises(ValueError, match="level_learning"):
        read(model, random_ids(1, 9), cache)


def test_learn_reads_a_text_and_reports(tiny_model, tmp_path, word_tokenizer):
    model = one_level(tiny_model)
    ids = random_ids(1, 28)
    logits, expected = read(model, ids)
    cache = HopeCache(model.config)
    report = model.learn(ids, cache=cache)
    torch.testing.assert_close(deltas(cache), deltas(expected), **SAME)
    assert report.loss == pytest.approx(F.cross_entropy(logits[0, :-1], ids[0, 1:]).item())
    assert (report.tokens, report.steps, len(report.losses)) == (28, [3], 4)
    weight = model.model.layers[2].continuum.levels[0].down_proj.weight
    assert report.drift == pytest.approx((deltas(cache)["2.0.down_proj"].norm() / weight.norm()).item())
    assert report.state_bytes == cache.level_bytes and "3 steps" in str(report)
    assert model.drift(cache) == report.drift and model.drift(HopeCache(model.config)) == 0
    second = model.learn("w1 w2 w3 w4", cache=cache, tokenizer=word_tokenizer)
    assert (second.tokens, second.steps) == (4, [1])
    model.config.level_learning.gate = True
    gated = model.learn(random_ids(1, 64, seed=7), cache=HopeCache(model.config))
    assert gated.skipped_gate > 0 and "by the gate" in str(gated)


def test_learn_shows_its_progress(tiny_model, capsys):
    model, ids = one_level(tiny_model), random_ids(2, 28)
    was_shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    try:
        expected = model.learn(ids, cache=HopeCache(model.config))
        assert not capsys.readouterr().err
        assert model.learn(ids, cache=HopeCache(model.config), progress=True) == expected
        shown = capsys.readouterr().err
    finally:
        if not was_shown:
            logging.disable_progress_bar()
    assert "learn: 100%" in shown and "56/56" in shown and "token" in shown


def test_generate_learns_from_the_prompt_and_from_new_tokens_when_asked(tiny_model):
    # so much that the new tokens change
    model, ids = one_level(tiny_model, learning=TEACHES | dict(rate=3.0, drift=20.0), **MIXED), random_ids(2, 21)
    arguments = dict(do_sample=False, max_new_tokens=12, pad_token_id=0)
    plain = model.generate(ids, **arguments)
    cache, both = HopeCache(model.config), HopeCache(model.config)
    taught = model.generate(ids, cache=cache, learn=True, **arguments)
    _, expected = read(model, ids)
    torch.testing.assert_close(deltas(cache), deltas(expected))
    assert cache.get_seq_length() == 32 and not torch.equal(taught, plain)
    assert torch.equal(model.generate(ids, cache=both, learn=True, learn_generated=True, **arguments), taught)
    read(model, taught[:, 21:32], expected)
    assert both.levels.tokens.tolist() == [32, 32]
    torch.testing.assert_close(deltas(both), deltas(expected))
    beams = model.generate(ids, learn=True, num_beams=3, **arguments)
    assert beams.shape == plain.shape
    with pytest.raises(ValueError, match="num_beams"):
        model.generate(ids, learn_generated=True, num_beams=3, **arguments)


def test_a_row_behind_padding_learns_and_goes_on_as_if_alone(tiny_model):
    model, ids, new = one_level(tiny_model, **MIXED), random_ids(2, 21), random_ids(2, 3, seed=2)
    arguments = dict(do_sample=False, max_new_tokens=9, pad_token_id=0, learn=True, learn_generated=True)
    arguments |= dict(output_logits=True, return_dict_in_generate=True)
    padded, alone = ids.clone(), ids[:1, 5:]
    padded[0, :5] = 0
    caches = [HopeCache(model.config) for _ in range(2)]
    found = []
    for text, cache in zip((padded, alone), caches, strict=True):
        mask = (text != 0).long()
        model.learn(text, cache=cache, attention_mask=mask)
        follow = new[: len(text)]
        mask = torch.cat([mask, torch.ones_like(follow)], dim=1)
        found.append(torch.stack(model.generate(follow, attention_mask=mask, cache=cache, **arguments).logits)[:, :1])
    torch.testing.assert_close(*found, rtol=0, atol=1e-9)
    torch.testing.assert_close(deltas(caches[0], slice(1)), deltas(caches[1]), rtol=0, atol=1e-9)


def test_a_call_that_cannot_learn_is_refused_and_changes_nothing(tiny_model):
    model, ids = one_level(tiny_model), random_ids(1, 20)
    cache = HopeCache(model.config)

    def refused(match, **arguments):
        with torch.no_grad(), pytest.raises(ValueError, match=match):
            model(**(dict(input_ids=ids, cache=cache, learn=True) | arguments))
        assert cache.levels is None and not cache.get_seq_length()

    refused("input_ids, not inputs_embeds", input_ids=None, inputs_embeds=torch.zeros(1, 3, 32).double())
    refused("position_ids", attention_mask=torch.arange(20)[None] // 10 + 1)
    refused(r"\(1, 1, 20, 20\).*learn=True", attention_mask=torch.ones(1, 1, 20, 20))
    refused("position_ids.*seq_idx", seq_idx=torch.zeros_like(ids))
    refused("output_hidden_states", output_hidden_states=True)
    refused("cannot hold what levels learn", cache=type("Other", (), {})())
    with torch.inference_mode(), pytest.raises(ValueError, match="torch.no_grad"):
        model(ids, learn=True)
    for ask in (lambda: model.level_drifts(cache), lambda: model.learn(ids)):
        with pytest.raises(ValueError, match="learned|HopeCache"):
            ask()
    projection = model.model.layers[2].continuum.levels[0].down_proj
    weight, projection.weight = projection.weight, torch.nn.Parameter(projection.weight.detach().flatten())
    refused(r"down_proj of block 2.*\[1280\] torch.float64")
    # as bitsandbytes holds four bits
    projection.weight = torch.nn.Parameter(torch.zeros(640, 1, dtype=torch.uint8), requires_grad=False)
    refused(r"down_proj of block 2.*\[640, 1\] torch.uint8")
    projection.weight = weight
    projection.to("meta")
    refused("down_proj of block 2.*offloaded")
    model.config.level_learning = None
    refused("level_learning")


def test_padding_and_ends_of_rows_are_not_learned(tiny_model):
    class StopsTheFirst(StoppingCriteria):
        def __call__(self, input_ids, scores, **_):
            return torch.tensor([input_ids.shape[1] >= 25, False])[: len(input_ids)]

    model, ids = one_level(tiny_model), random_ids(2, 21)
    arguments = dict(do_sample=False, max_new_tokens=12, pad_token_id=0)
    end = model.generate(ids, learn=True, **arguments)[0, 25].item()
    cache = HopeCache(model.config)
    tokens = model.generate(ids, cache=cache, learn=True, learn_generated=True, eos_token_id=end, **arguments)
    ended = (tokens[:, 21:-1] == end).long()
    assert cache.levels.tokens.tolist() == (21 + (ended.cumsum(1) - ended == 0).sum(1)).tolist()
    assert cache.levels.tokens[0] < cache.levels.tokens[1]
    # a criterion that stops one row; `generate` does not read the last token
    caches = [HopeCache(model.config) for _ in range(2)]
    arguments |= dict(learn_generated=True, eos_token_id=63)
    for rows, cache in zip((ids, ids[:1]), caches, strict=True):
        model.generate(rows, cache=cache, stopping_criteria=[StopsTheFirst()], **arguments)
    assert caches[1].levels.tokens.tolist() == [3] and caches[0].levels.tokens.tolist()[0] in (3, 4)


WRONG = [
    (dict(periods=[0]), "periods"),
    (dict(periods=[8, 8]), "periods"),
    (dict(rate=-1.0), "rate"),
    (dict(rate=math.nan), "rate"),
    (dict(drift=math.inf), "drift"),
    (dict(matrices=["q_proj"]), "gate_proj, up_proj, down_proj"),
    (dict(blocks=[3]), "blocks"),
    (dict(speed=1), "'speed'"),
    (dict(rate="fast"), "wrong value"),
]


@pytest.mark.parametrize("fields, match", WRONG, ids=str)
def test_wrong_fields_are_refused(fields, match):
    sizes = dict(hidden_size=64, num_hidden_layers=3, level_periods=[1], level_intermediate_sizes=[8])
    with pytest.raises((ValueError, StrictDataclassError), match=f"level_learning(.|\n)*{match}|{match}"):
        HopeConfig(**sizes, level_learning=fields)


def test_fields_survive_the_configuration_file(tmp_path):
    config = HopeConfig(hidden_size=64, num_hidden_layers=8, level_periods=[1], level_learning=dict(rate=0.01))
    config.save_pretrained(tmp_path)
    again = HopeConfig.from_pretrained(tmp_path)
    assert again.level_learning == LevelLearning(rate=0.01)
    assert again.level_learning.resolved(again).blocks == [6, 7]
    assert again.level_learning.resolved(again).periods == [512]


def test_bfloat16_weights_keep_float32_differences(tiny_model):
    model, ids = one_level(tiny_model, torch.bfloat16), random_ids(1, 40)
    _, cache = read(model, ids)
    exact, expected = read(one_level(tiny_model, torch.float32), ids)
    for name, delta in deltas(cache).items():
        assert delta.dtype == torch.float32
        assert (delta - deltas(expected)[name]).norm() / delta.norm() < 0.3
    assert model(ids[:, :5], cache=cache).logits.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning")
def test_adapters_and_int8_weights_learn_and_stay(tiny_model, tmp_path):
    # `make` installs torchao for the tests alone.
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    ids = random_ids(2, 40)
    adapted = get_peft_model(
        one_level(tiny_model, torch.float32, **HYBRID),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False),
    ).eval()
    small = one_level(tiny_model, torch.float32, **HYBRID)
    quantize_(small, Int8WeightOnlyConfig())
    for model in (adapted, small):
        cache = HopeCache(model.config)
        before = {name: str(weight) for name, weight in model.named_parameters()}
        with torch.no_grad():
            logits = model(input_ids=ids, cache=cache, learn=True).logits
            frozen = model(input_ids=ids).logits
        assert cache.levels.steps.tolist() == [[5], [5]]
        assert torch.allclose(logits[:, :8], frozen[:, :8], atol=1e-5)
        assert (logits - frozen)[:, 8:].abs().max() > 3e-3
        assert {name: str(weight) for name, weight in model.named_parameters()} == before
    # a file of the adapted model, whether PEFT's class or the model in it is named
    cache = HopeCache(adapted.config)
    adapted.learn(ids, cache=cache)
    cache.save_pretrained(tmp_path, adapted)
    for model in (adapted, adapted.get_base_model()):
        found = HopeCache.from_pretrained(tmp_path, model)
        assert all(torch.equal(delta, cache.levels.deltas[key]) for key, delta in found.levels.deltas.items())


def test_a_compiled_model_learns_the_same(tiny_model):
    model, ids = one_level(tiny_model, torch.float32, **ATTENTION), random_ids(1, 40)
    _, expected = read(model, ids)
    compiled, cache = torch.compile(model, backend="eager"), HopeCache(model.config)
    read(compiled, ids, cache)
    torch.testing.assert_close(deltas(cache), deltas(expected))
