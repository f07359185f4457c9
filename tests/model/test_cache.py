"""Caches as values: rows of several users, forks, devices, caches of transformers, and what stays refused."""

import copy

import pytest
import torch
from learning_models import random_ids
from mixers import ATTENTION, MIXED, STATES
from transformers import DynamicCache, StaticCache

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
    before = copy.deepcopy([cache.state_tensors() for cache in alone])
    batch, mask = HopeCache.joined(alone)
    assert mask.tolist() == [[0] * (23 - length) + [1] * length for length in (17, 9, 23)]
    questions = torch.cat([torch.nn.functional.pad(part, (5 - part.shape[1], 0)) for part in QUESTIONS])
    mask = torch.cat([mask, (questions != 0).long()], dim=1)
    written = model.generate(questions, attention_mask=mask, cache=copy.deepcopy(batch), **GREEDY)[:, 5:]
    read(model, questions, batch, attention_mask=mask)
    parts = batch.split(mask)
    torch.testing.assert_close([cache.state_tensors() for cache in alone], before, rtol=0, atol=0)
    for part, cache, question, tokens in zip(parts, alone, QUESTIONS, written, strict=True):
        expected = model.generate(question, cache=copy.deepcopy(cache), **GREEDY)
        assert torch.equal(tokens, expected[0, question.shape[1] :])
        read(model, question, cache)
        assert part.get_seq_length() == cache.get_seq_length() and part.num_sequences == 1
        # each goes on alone, and learns where it had stopped
        for learn in (False, True):
            found, expected = (read(model, random_ids(1, 11), one, learn=learn)[0] for one in (part, cache))
            torch.testing.assert_close(found, expected, **EXACT)
        torch.testing.assert_close(part.levels.deltas, cache.levels.deltas, **EXACT)


def test_a_reset_cache_is_a_new_one(tiny_model):
    model, ids = tiny_model(torch.float64, level_learning=LEARNS, **MIXED), random_ids(2, 11)
    _, cache = read(model, random_ids(2, 20, seed=8), learn=True)
    cache.reset()
    assert cache.get_seq_length() == 0 and cache.levels is None
    assert torch.equal(read(model, ids, cache)[0], model(ids).logits)


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_a_cache_moves_to_another_device(tiny_model, options):
    cache = read(tiny_model(**options), random_ids(1, 9))[1].to("meta")
    assert {tensor.device.type for name, tensor in cache.state_tensors().items() if "columns" not in name} == {"meta"}
    assert {layer.device.type for layer in cache.layers} == {"meta"}


def test_a_layer_moved_away_and_back_holds_the_same_state(tiny_model):
    _, cache = read(tiny_model(), random_ids(2, 11))
    layer = cache.layers[0]
    before = {name: tensor.clone() for name, tensor in layer.named_tensors().items()}
    layer.offload()
    layer.prefetch()
    assert all(torch.equal(tensor, before[name]) for name, tensor in layer.named_tensors().items())
    # to a device where nothing is computed, to see that every tensor is moved
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {part.device.type for name, part in layer.named_tensors().items() if name != "columns"} == {"meta"}


@torch.no_grad()
@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_caches_of_transformers_carry_the_state(tiny_model, options):
    model, ids = tiny_model(torch.float64, **options), random_ids(2, 14)
    whole = model(ids).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=14)):
        parts = [model(part, cache=cache).logits for part in ids.split([9, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)
    assert torch.equal(model.generate(ids, cache=DynamicCache(), **GREEDY), model.generate(ids, **GREEDY))


def test_a_memory_does_not_grow(tiny_model):
    model, sizes, cache = tiny_model(), set(), None
    for part in random_ids(1, 96).split(32, dim=1):
        _, cache = read(model, part, cache)
        sizes.add(sum(tensor.numel() for tensor in cache.state_tensors().values()))
    assert len(sizes) == 1


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_a_cache_with_a_graph_is_detached_before_it_is_copied(tiny_model, options):
    model, after = tiny_model(**options), random_ids(1, 3)
    cache = HopeCache(model.config)
    model(random_ids(1, 9), cache=cache)
    with pytest.raises(ValueError, match="detach_"):
        copy.deepcopy(cache)
    before = {name: tensor.clone() for name, tensor in cache.state_tensors().items()}
    fork = copy.deepcopy(cache.detach_())
    assert all(torch.equal(part, before[name]) for name, part in cache.state_tensors().items())
    assert torch.equal(read(model, after, fork)[0], read(model, after, cache)[0])


def test_a_cache_that_cannot_be_cropped_stays_whole(tiny_model):
    _, cache = read(tiny_model(layer_types=["full_attention", "hope_memory"]), random_ids(1, 9))
    with pytest.raises(RuntimeError, match="cannot unread"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [9, 9]
    with pytest.raises(RuntimeError, match="no keys and values"):
        cache.layers[1].update(None, None)


def test_what_cannot_be_joined_split_or_rolled_back_is_refused(tiny_model):
    model, other = tiny_model(), tiny_model(num_hidden_layers=3)
    caches = [read(one, TEXTS[0])[1] for one in (model, other)]
    refused = {
        "at least one": lambda: HopeCache.joined([]),
        "empty": lambda: HopeCache.joined([caches[0], HopeCache(model.config)]),
        "of one model": lambda: HopeCache.joined(caches),
        r"\(1, 17\)": lambda: HopeCache.joined(caches[:1], [torch.ones(1, 3)]),
        r"\(1, 17\)\] are": lambda: HopeCache.joined(caches[:1], [torch.ones(1, 17)] * 2),
        r"\(1, 17\) is": lambda: caches[0].split(torch.ones(1, 3)),
        "other layers": lambda: caches[0].rollback(read(tiny_model(**ATTENTION), TEXTS[0])[1].snapshot()),
    }
    for words, call in refused.items():
        with pytest.raises(ValueError, match=words):
            call()
