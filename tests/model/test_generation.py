"""`generate()` against loops written by hand that read the whole text anew for every token."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from mixers import STATES, random_ids
from transformers import StaticCache

from hope_hf import HopeCache
from hope_hf.model import generation_hope
from hope_hf.model.cache_hope import CACHE_NAME

NEW = 7


@pytest.fixture(params=STATES.values(), ids=STATES)
def model(request, tiny_model):
    return tiny_model(torch.float64, **request.param)


@torch.no_grad()
def generate(model, ids, **options):
    return model.generate(ids, **{"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options})


@torch.no_grad()
def next_logits(model, ids):
    return model(ids, use_cache=False).logits[:, -1]


def greedy(model, ids):
    """The new tokens alone."""
    length = ids.shape[1]
    for _ in range(NEW):
        ids = torch.cat([ids, next_logits(model, ids).argmax(-1, keepdim=True)], dim=1)
    return ids[:, length:]


@torch.no_grad()
def read(model, ids, cache=None, **inputs):
    cache = HopeCache(model.config) if cache is None else cache
    model(ids, cache=cache, **inputs)
    return cache


def pad_left(rows):
    longest = max(len(row) for row in rows)
    ids = torch.stack([F.pad(row, (longest - len(row), 0)) for row in rows])
    return ids, (ids != 0).long()


def test_greedy_equals_a_loop_without_cache_and_reads_every_token_once(model):
    ids = random_ids(2, 13)
    expected = greedy(model, ids)
    assert len(set(expected.flatten().tolist())) > 3
    lengths = []
    model.get_input_embeddings().register_forward_hook(lambda _, inputs, output: lengths.append(inputs[0].shape[1]))
    out = generate(model, ids, return_dict_in_generate=True)
    assert torch.equal(out.sequences[:, 13:], expected) and type(out[CACHE_NAME]) is HopeCache
    assert lengths == [13] + [1] * (NEW - 1)


def test_beam_search_equals_a_search_without_cache(model):
    ids = random_ids(1, 10, seed=1)
    found, expected = (generate(model, ids, num_beams=3, use_cache=use_cache) for use_cache in (True, False))
    assert torch.equal(found, expected)
    assert not torch.equal(found[:, 10:], greedy(model, ids))


@pytest.mark.parametrize("options", [{}, dict(num_beams=3), dict(prefill_chunk_size=4)], ids=str)
def test_left_padded_rows_generate_what_they_do_alone(model, options):
    rows = [random_ids(length, seed=length) for length in (17, 3, 1)]
    ids, mask = pad_left(rows)
    # offloaded keys and values need a CUDA device
    kinds = ["dynamic", "static", *["offloaded"] * (model.config.attention_layer is None)]
    for kind in kinds:
        together = generate(model, ids, attention_mask=mask, cache_implementation=kind, **options)[:, 17:]
        for row, generated in zip(rows, together, strict=True):
            assert torch.equal(generated, generate(model, row[None], **options)[0, len(row) :])


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_whole_text_and_new_tokens_alone_continue_a_cache(model, kind):
    ids = random_ids(2, 16, seed=1)
    new, mask = ids[:, 11:], torch.ones_like(ids)
    expected = greedy(model, ids)
    calls = [(ids, {}), (new, {}), (new, dict(attention_mask=mask[:, 11:]))]
    if kind == "dynamic":
        calls.append((ids, dict(attention_mask=mask)))
    for given, call in calls:
        cache = StaticCache(model.config, max_cache_len=40) if kind == "static" else HopeCache(model.config)
        read(model, ids[:, :11], cache)
        result = generate(model, given, cache=cache, **call)
        assert torch.equal(result, torch.cat([given, expected], dim=1))
        assert int(cache.get_seq_length()) == 16 + NEW - 1
    # a first token taken for a document's beginning would read the same as no memory
    assert not torch.equal(expected, greedy(model, new))


@pytest.mark.parametrize("is_before_5_21", [False, True])
def test_a_prefill_in_chunks_follows_a_cache(model, monkeypatch, is_before_5_21):
    """Which transformers cuts, or what stands in for it in older versions."""
    if is_before_5_21:
        monkeypatch.setattr(generation_hope, "_CHUNKS_FOLLOW_A_CACHE", False)
    # padding, as newer versions leave a mask of ones out
    ids, mask = pad_left([random_ids(17), random_ids(16)])
    expected = generate(model, ids, attention_mask=mask)
    for given in (ids, ids[:, 9:]):
        cache = read(model, ids[:, :9], attention_mask=mask[:, :9])
        result = generate(model, given, attention_mask=mask, cache=cache, prefill_chunk_size=3)
        assert torch.equal(result[:, -NEW:], expected[:, -NEW:])
        assert cache.get_seq_length() == 17 + NEW - 1


@pytest.mark.parametrize("size", [None, 3])
def test_one_memory_answers_several_questions(model, size):
    """Of unequal lengths, with padding that a mask tells, or the padding token."""
    book, questions = random_ids(1, 11), [random_ids(length, seed=length) for length in (6, 2, 4)]
    ids, mask = pad_left(questions)
    for given in ({}, {"attention_mask": mask}):
        cache = read(model, book)
        cache.batch_repeat_interleave(3)
        results = generate(model, ids, cache=cache, prefill_chunk_size=size, **given)
        for question, result in zip(questions, results, strict=True):
            assert torch.equal(result[None, 6:], greedy(model, torch.cat([book[0], question])[None]))


def test_guesses_that_attention_accepts_are_those_of_greedy_search(tiny_model):
    """Keys and values of rejected guesses are dropped: by prompt lookup, and by an assistant model."""
    model = tiny_model(torch.float64, layer_types=["full_attention"] * 2, level_learning={})
    ids = torch.tensor([[3, 4, 5, 6] * 4])
    expected = generate(model, ids)
    assistant = tiny_model(torch.float64, layer_types=["full_attention"] * 2, seed=1)
    for helper in (dict(prompt_lookup_num_tokens=3), dict(assistant_model=assistant)):
        out = generate(model, ids, return_dict_in_generate=True, **helper)
        assert torch.equal(out.sequences, expected)
        cache = out[CACHE_NAME]
        assert cache.get_seq_length() == cache.archive.tokens.shape[1] == 16 + NEW - 1
        # levels would learn from the guesses, too
        for learn in (dict(learn=True), dict(learn_generated=True)):
            with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
                generate(model, ids, **helper, **learn)


def test_more_new_tokens_than_were_read_are_all_read(tiny_model, monkeypatch):
    warnings = []
    monkeypatch.setattr(generation_hope.logger, "warning_once", warnings.append)
    model, ids = tiny_model(torch.float64), random_ids(2, 16)
    cache = read(model, ids[:, :5])
    result = generate(model, ids[:, 5:], cache=cache)
    assert torch.equal(result[:, 11:], greedy(model, ids))
    assert len(warnings) == 1
    # a cache without an archive goes by the mask, as all caches of transformers do
    for cache in (HopeCache(model.config, archive=False), StaticCache(model.config, max_cache_len=40)):
        read(model, ids[:, :5], cache)
        result = generate(model, ids[:, 5:], cache=cache, attention_mask=torch.ones_like(ids))
        assert torch.equal(result[:, 11:], greedy(model, ids))


def test_what_a_cache_has_read_is_no_new_text(tiny_model):
    model, ids = tiny_model(torch.float64), random_ids(2, 9)
    with pytest.raises(ValueError, match="attention_mask of 18 columns"):
        generate(model, ids, cache=read(model, ids))
    twice = generate(model, ids, cache=read(model, ids), attention_mask=torch.ones(2, 18, dtype=torch.long))
    assert torch.equal(twice[:, 9:], greedy(model, torch.cat([ids, ids], dim=1)))


def test_a_text_of_embeddings_is_told_from_new_tokens_by_its_length(tiny_model):
    model, ids = tiny_model(torch.float64), random_ids(2, 16)
    embeddings = model.get_input_embeddings()(ids)
    expected = greedy(model, ids)

    assert torch.equal(generate(model, None, inputs_embeds=embeddings), expected)
    for inputs in ({"input_ids": ids}, {"input_ids": ids[:, 9:]}, {"inputs_embeds": embeddings}):
        cache = read(model, None, inputs_embeds=embeddings[:, :9])
        result = generate(model, None, cache=cache, **inputs)
        assert torch.equal(result[:, -NEW:], expected)
    with pytest.raises(ValueError, match="inputs_embeds"):
        generate(model, None, inputs_embeds=embeddings[:, 9:], cache=cache)


def test_keys_that_are_quantised_are_read_on(tiny_model):
    """Such a layer holds no keys as they are, whose rows could be counted."""
    model, ids = tiny_model(**STATES["attention"]), random_ids(2, 8)
    options = dict(cache_implementation="quantized", cache_config={"backend": "fp8"})
    assert generate(model, ids, **options)[:, 8:].shape == greedy(model, ids).shape


def test_a_static_memory_stays_where_it_is(tiny_model):
    """A graph that is replayed on a GPU reads and writes the addresses it was recorded with."""
    model, places = tiny_model(), []
    cache = StaticCache(model.config, max_cache_len=20)
    # the first part ends where a chunk does
    for part in random_ids(2, 12).split([8, 1, 3], dim=1):
        read(model, part, cache)
        held = cache.layers[0].named_tensors() | {"columns": cache.layers[0].past.columns}
        places.append({name: tensor.data_ptr() for name, tensor in held.items()})
    assert places[0] and places[0] == places[1] == places[2]
    assert len(set(places[0].values())) == len(places[0]), "two of them share their memory"


def test_logits_to_keep(tiny_model):
    model, ids = tiny_model(torch.float64), random_ids(2, 9)
    every = model(ids).logits
    chosen = torch.tensor([0, 5, 6])
    for kept, expected in ((3, every[:, -3:]), (chosen, every[:, chosen])):
        torch.testing.assert_close(model(ids, logits_to_keep=kept).logits, expected, rtol=1e-12, atol=1e-12)


def test_a_cache_may_have_its_older_name(model):
    ids = random_ids(1, 9)
    results = []
    for name in ("cache", "past_key_values"):
        cache = HopeCache(model.config)
        # transformers says so from the release on that renamed it
        warned = pytest.warns(FutureWarning, match="Use `cache`") if name != CACHE_NAME == "cache" else nullcontext()
        with warned:
            model(ids, **{name: cache})
        with warned:
            results.append(generate(model, ids.repeat(1, 2), **{name: cache}))
        assert cache.get_seq_length() == 18 + NEW - 1
    assert torch.equal(*results)
