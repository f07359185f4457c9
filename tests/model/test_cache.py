"""Caches as values: rows of several users, forks, devices, caches of transformers, and what stays refused."""

import copy

import pytest
import torch
import torch.nn.functional as F
from mixers import MIXED, STATES, random_ids
from transformers import DynamicCache

from hope_hf import HopeCache

LEARNS = dict(periods=[8, 16], rate=0.3, drift=2.0, gate=False, brake=0.0)
TEXTS = [random_ids(1, length, seed=length) for length in (17, 9, 23)]
QUESTIONS = [random_ids(1, length, seed=length) for length in (3, 5, 2)]
GREEDY = dict(max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
EXACT = dict(rtol=1e-9, atol=1e-9)


@torch.no_grad()
def read(model, ids, cache=None, **options):
    """Logits of a text, and the cache after it."""
    cache = HopeCache(model.config) if cache is None else cache
    return model(ids, cache=cache, **options).logits, cache


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_joined_users_write_and_learn_as_alone_and_part_again(tiny_model, options):
    """The levels of the first two have learned, the second with an open period."""
    model = tiny_model(torch.float64, level_learning=LEARNS, **options)
    alone = [read(model, text, learn=index < 2)[1] for index, text in enumerate(TEXTS)]
    batch, mask = HopeCache.joined(alone)
    assert mask.tolist() == [[0] * (23 - length) + [1] * length for length in (17, 9, 23)]
    questions = torch.cat([F.pad(question, (5 - question.shape[1], 0)) for question in QUESTIONS])
    mask = torch.cat([mask, (questions != 0).long()], dim=1)
    written = model.generate(questions, attention_mask=mask, cache=batch, **GREEDY)[:, 5:]
    parts = batch.split(F.pad(mask, (0, 5), value=1))
    for part, cache, question, tokens in zip(parts, alone, QUESTIONS, written, strict=True):
        expected = model.generate(question, cache=cache, **GREEDY)
        assert torch.equal(tokens, expected[0, question.shape[1] :])
        assert part.get_seq_length() == cache.get_seq_length() and part.num_sequences == 1
        # each goes on alone, and learns where it had stopped
        expected, _ = read(model, random_ids(1, 11), cache, learn=True)
        found, _ = read(model, random_ids(1, 11), part, learn=True)
        torch.testing.assert_close(found, expected, **EXACT)
        torch.testing.assert_close(part.levels.deltas, cache.levels.deltas, **EXACT)


def test_a_reset_cache_is_a_new_one(tiny_model):
    model, ids = tiny_model(torch.float64, level_learning=LEARNS, **MIXED), random_ids(2, 11)
    _, cache = read(model, random_ids(2, 20, seed=8), learn=True)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.levels is None
    assert torch.equal(read(model, ids, cache)[0], model(ids).logits)


def test_a_cache_moves_to_another_device(tiny_model):
    cache = read(tiny_model(**MIXED), random_ids(1, 9))[1].to("meta")
    assert {tensor.device.type for name, tensor in cache.state_tensors().items() if "columns" not in name} == {"meta"}
    assert {layer.device.type for layer in cache.layers} == {"meta"}


@torch.no_grad()
@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_a_cache_of_transformers_carries_the_state(tiny_model, options):
    model, ids = tiny_model(torch.float64, **options), random_ids(2, 14)
    cache = DynamicCache()
    parts = [model(part, cache=cache).logits for part in ids.split([9, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(ids).logits, **EXACT)
    assert torch.equal(model.generate(ids, cache=DynamicCache(), **GREEDY), model.generate(ids, **GREEDY))


def test_a_cache_with_a_graph_is_detached_before_it_is_copied(tiny_model):
    model, after = tiny_model(**MIXED), random_ids(1, 3)
    cache = HopeCache(model.config)
    model(random_ids(1, 9), cache=cache)
    with pytest.raises(ValueError, match="detach_"):
        copy.deepcopy(cache)
    fork = copy.deepcopy(cache.detach_())
    assert torch.equal(read(model, after, fork)[0], read(model, after, cache)[0])


def test_a_cache_that_cannot_be_cropped_stays_whole(tiny_model):
    _, cache = read(tiny_model(layer_types=["full_attention", "hope_memory"]), random_ids(1, 9))
    with pytest.raises(RuntimeError, match="cannot unread"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]
    with pytest.raises(RuntimeError, match="no keys and values"):
        cache.layers[1].update(None, None)


@pytest.mark.parametrize("kind", ["window_attention", "retaining_attention"])
def test_caches_with_other_windows_are_not_joined(tiny_model, kind):
    """They were padded, as blocks of sparse attention are."""
    caches = []
    for window in (4, 8):
        _, cache = read(tiny_model(layer_types=[kind] * 2, sliding_window=window), TEXTS[0])
        caches.append(cache)
    with pytest.raises(ValueError, match="of one model"):
        HopeCache.joined(caches)


def test_what_cannot_be_joined_split_or_rolled_back_is_refused(tiny_model):
    model = tiny_model()
    _, cache = read(model, TEXTS[0])
    _, deeper = read(tiny_model(num_hidden_layers=3), TEXTS[0])
    for words, caches in (
        ("at least one", []),
        ("empty", [HopeCache(model.config)]),
        ("of one model", [cache, deeper]),
    ):
        with pytest.raises(ValueError, match=words):
            HopeCache.joined(caches)
    with pytest.raises(ValueError, match=r"\(1, 17\)"):
        HopeCache.joined([cache], [torch.ones(1, 3)])
    with pytest.raises(ValueError, match=r"\(1, 17\)"):
        cache.split(torch.ones(1, 3))
    with pytest.raises(ValueError, match="other layers"):
        cache.rollback(deeper.snapshot())


def test_caches_of_many_blocks_join_by_name(tiny_model, tmp_path):
    """A file sorts block 10 before block 2; the cache from it joins one that was just read."""
    model = tiny_model(num_hidden_layers=11, level_learning=LEARNS | {"periods": [4, 8], "blocks": list(range(11))})
    caches = []
    for row in range(2):
        cache = HopeCache(model.config)
        model(random_ids(1, 12, seed=row), cache=cache, learn=True)
        caches.append(cache)
    caches[1].save_pretrained(tmp_path, model)
    joined, _ = HopeCache.joined([caches[0], HopeCache.from_pretrained(tmp_path, model)])
    for row, cache in enumerate(caches):
        for key, delta in cache.levels.deltas.items():
            assert torch.equal(joined.levels.deltas[key][row], delta[0]), key
