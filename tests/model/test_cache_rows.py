"""Rows of caches: several users' caches as one batch and apart again, and beams from a cache of one row."""

import copy

import pytest
import torch
from learning_models import random_ids
from mixers import LAYERS, WINDOW_HYBRID

from hope_hf import HopeCache

LEARNS = dict(periods=[8, 16], rate=0.3, drift=2.0, gate=False, brake=0.0)
TEXTS = [random_ids(1, length, seed=length) for length in (17, 9, 23)]
QUESTIONS = [random_ids(1, length, seed=length) for length in (3, 5, 2)]
GREEDY = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)


def users_caches(model):
    """Caches that have read `TEXTS`; the levels of the first two have learned, the second with an open period."""
    caches = [HopeCache(model.config) for _ in TEXTS]
    with torch.no_grad():
        for index, (text, cache) in enumerate(zip(TEXTS, caches, strict=True)):
            model(text, cache=cache, learn=index < 2)
    return caches


def padded(parts):
    """Rows with padding in front, and their mask."""
    longest = max(part.shape[1] for part in parts)
    rows = [torch.nn.functional.pad(part, (longest - part.shape[1], 0)) for part in parts]
    return torch.cat(rows), (torch.cat(rows) != 0).long()


def answer(model, cache, ids, **options):
    with torch.no_grad():
        return model(ids, cache=cache, **options).logits


@pytest.mark.parametrize("options", [*LAYERS.values(), WINDOW_HYBRID], ids=[*LAYERS, "window-hybrid"])
def test_joined_users_read_and_write_as_alone_and_part_again(tiny_model, options):
    model = tiny_model(torch.float64, level_learning=LEARNS, **options)
    alone = users_caches(model)
    batch, mask = HopeCache.joined(alone)
    assert mask.tolist() == [[0] * (23 - length) + [1] * length for length in (17, 9, 23)]
    questions, own = padded(QUESTIONS)
    mask = torch.cat([mask, own], dim=1)
    written = model.generate(questions, attention_mask=mask, cache=copy.deepcopy(batch), **GREEDY)
    together = answer(model, batch, questions, attention_mask=mask)
    parts = batch.split(mask)
    for row, (cache, question) in enumerate(zip(alone, QUESTIONS, strict=True)):
        expected = model.generate(question, cache=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(written[row, questions.shape[1] :], expected[0, question.shape[1] :])
        logits = answer(model, cache, question)
        torch.testing.assert_close(together[row, -question.shape[1] :], logits[0], rtol=1e-9, atol=1e-9)
        assert parts[row].get_seq_length() == cache.get_seq_length() and parts[row].num_sequences == 1
        # each goes on alone, and learns where it had stopped
        new = random_ids(1, 11, seed=row)
        for learn in (False, True):
            found, expected = (answer(model, one, new, learn=learn) for one in (parts[row], cache))
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        for key, delta in cache.levels.deltas.items():
            torch.testing.assert_close(parts[row].levels.deltas[key], delta, rtol=1e-9, atol=1e-9)


def test_joining_and_splitting_leave_the_caches_as_they_are(tiny_model):
    model = tiny_model(torch.float64, level_learning=LEARNS, **LAYERS["sparse-hybrid"])
    caches = users_caches(model)
    before = [{name: tensor.clone() for name, tensor in cache.state_tensors().items()} for cache in caches]
    batch, mask = HopeCache.joined(caches)
    batch.split(mask)
    answer(model, batch, torch.cat([TEXTS[0][:, :2]] * 3))
    for cache, held in zip(caches, before, strict=True):
        found = cache.state_tensors()
        assert found.keys() == held.keys() and all(torch.equal(found[name], held[name]) for name in held)


def test_what_cannot_be_joined_or_split_is_refused(tiny_model):
    model, other = tiny_model(), tiny_model(num_hidden_layers=3)
    caches = [HopeCache(one.config) for one in (model, other)]
    for one, cache in zip((model, other), caches, strict=True):
        answer(one, cache, TEXTS[0])
    for wrong, match in (([], "at least one"), ([caches[0], HopeCache(model.config)], "none that is empty")):
        with pytest.raises(ValueError, match=match):
            HopeCache.joined(wrong)
    with pytest.raises(ValueError, match="join those of one model"):
        HopeCache.joined(caches)
    for masks in ([torch.ones(1, 3)], [torch.ones(1, 17)] * 2):
        with pytest.raises(ValueError, match=r"\[\(1, 17\)\] are needed"):
            HopeCache.joined(caches[:1], masks)
    with pytest.raises(ValueError, match=r"\(1, 3\), and \(1, 17\) is needed"):
        caches[0].split(torch.ones(1, 3))


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("several", [dict(num_beams=3, num_return_sequences=2), dict(num_return_sequences=3)])
def test_beams_and_samples_go_on_from_a_cache_of_one_row(tiny_model, options, several):
    model = tiny_model(torch.float64, level_learning=LEARNS, **options)
    asks = GREEDY | several | dict(do_sample="num_beams" not in several)
    found = []
    for repeats in (1, 3):
        cache = users_caches(model)[0]
        cache.batch_repeat_interleave(repeats)
        torch.manual_seed(0)
        found.append(model.generate(QUESTIONS[0], cache=cache, **asks))
        assert cache.num_sequences == 3
    assert torch.equal(*found) and len(found[0]) == several["num_return_sequences"]
