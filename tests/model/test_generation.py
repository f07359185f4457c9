"""`generate()` against loops written by hand that read the whole text anew for every token."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from mixers import STATES
from transformers import StaticCache

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.model import generation_hope
from hope_hf.model.cache_hope import CACHE_NAME

NEW = 7


@pytest.fixture(params=STATES.values(), ids=STATES)
def model(request, tiny_model):
    return tiny_model(torch.float64, **request.param)


def text(*shape, seed=5):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


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
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :], mask[index, longest - len(row) :] = row, 1
    return ids, mask


@pytest.fixture
def calls(monkeypatch):
    """Arguments of every call of the model."""
    seen, forward = [], HopeForCausalLM.forward

    def record(self, *args, **kwargs):
        seen.append(kwargs)
        return forward(self, *args, **kwargs)

    # generate reads the signature to know which arguments the model takes
    record.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(HopeForCausalLM, "forward", record)
    return seen


def test_greedy_equals_a_loop_without_cache_and_reads_every_token_once(model, calls):
    ids = text(2, 13)
    expected = greedy(model, ids)
    assert len(set(expected.flatten().tolist())) > 3
    calls.clear()
    made = generate(model, ids, return_dict_in_generate=True)
    assert torch.equal(made.sequences[:, 13:], expected) and type(made[CACHE_NAME]) is HopeCache
    assert [call["input_ids"].shape[1] for call in calls] == [13] + [1] * (NEW - 1)
    assert torch.equal(generate(model, ids, use_cache=False)[:, 13:], expected)


def test_generation_stops_at_the_end_of_sequence_row_by_row(model):
    ids = text(3, 9)
    free = greedy(model, ids)
    end = free[0, 3].item()
    stopped = generate(model, ids, eos_token_id=end)[:, 9:]
    for row, expected in zip(stopped, free, strict=True):
        length = (expected == end).nonzero()[0].item() + 1 if (expected == end).any() else NEW
        assert torch.equal(row[:length], expected[:length]) and not row[length:].any()


def test_sampling_draws_from_the_distribution_of_a_loop_without_cache(model):
    ids = text(2, 10)
    torch.manual_seed(7)
    sampled = generate(model, ids, do_sample=True, top_k=5, temperature=0.7)
    torch.manual_seed(7)
    expected = ids
    for _ in range(NEW):
        scores = next_logits(model, expected) / 0.7
        scores = scores.masked_fill(scores < scores.topk(5).values[:, -1:], float("-inf"))
        expected = torch.cat([expected, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    assert torch.equal(sampled, expected)


def beam_search(model, ids, num_beams):
    """The best of `num_beams` continuations of one text, each kept by its summed log-probability."""
    beams = [(0.0, ids)]
    for _ in range(NEW):
        grown = []
        for score, row in beams:
            log_probabilities = next_logits(model, row).log_softmax(-1)[0]
            for token in log_probabilities.topk(num_beams).indices:
                grown.append((score + log_probabilities[token].item(), torch.cat([row, token[None, None]], dim=1)))
        beams = sorted(grown, key=lambda beam: -beam[0])[:num_beams]
    return torch.cat([beam for _, beam in beams])


def test_beam_search_equals_a_search_without_cache(model):
    ids = text(1, 10, seed=1)
    found = generate(model, ids, num_beams=3, num_return_sequences=3)
    assert torch.equal(found, beam_search(model, ids, 3))
    assert not torch.equal(found[:1, 10:], greedy(model, ids))


@pytest.mark.parametrize("options", [{}, dict(num_beams=3), dict(prefill_chunk_size=4)], ids=str)
def test_left_padded_rows_generate_what_they_do_alone(model, options):
    rows = [text(length, seed=length) for length in (17, 3, 1)]
    ids, mask = pad_left(rows)
    # offloaded keys and values need a CUDA device
    kinds = ["dynamic", "static", *["offloaded"] * (model.config.attention_layer is None)]
    for kind in kinds:
        together = generate(model, ids, attention_mask=mask, cache_implementation=kind, **options)[:, 17:]
        for row, generated in zip(rows, together, strict=True):
            assert torch.equal(generated, generate(model, row[None], **options)[0, len(row) :])


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_a_whole_text_and_new_tokens_alone_continue_a_cache(model, masked, kind):
    ids = text(2, 16, seed=1)
    expected = greedy(model, ids)
    for given in (ids, ids[:, 11:]):
        if kind == "static" and given is ids and masked:
            continue
        cache = read(model, ids[:, :11], StaticCache(model.config, max_cache_len=40) if kind == "static" else None)
        mask = dict(attention_mask=torch.ones_like(given)) if masked else {}
        result = generate(model, given, cache=cache, **mask)
        assert torch.equal(result, torch.cat([given, expected], dim=1))
        assert int(cache.get_seq_length()) == 16 + NEW - 1
    # a first token taken for a document's beginning would read the same as no memory
    assert not torch.equal(expected, greedy(model, ids[:, 11:]))


@pytest.mark.parametrize("is_before_5_21", [False, True])
def test_a_prefill_in_chunks_follows_a_cache(model, monkeypatch, is_before_5_21):
    """Which transformers cuts, or what stands in for it in older versions."""
    if is_before_5_21:
        monkeypatch.setattr(generation_hope, "_CHUNKS_FOLLOW_A_CACHE", False)
    # padding, as newer versions leave a mask of ones out
    ids, mask = pad_left([text(17), text(16)])
    expected = generate(model, ids, attention_mask=mask)
    for given in (ids, ids[:, 9:]):
        cache = read(model, ids[:, :9], attention_mask=mask[:, :9])
        result = generate(model, given, attention_mask=mask, cache=cache, prefill_chunk_size=3)
        assert torch.equal(result[:, -NEW:], expected[:, -NEW:])
        assert cache.get_seq_length() == 17 + NEW - 1


@pytest.mark.parametrize("size", [None, 3])
def test_one_memory_answers_several_questions(model, size):
    """Of unequal lengths, with padding that a mask tells, or the padding token."""
    book, questions = text(1, 11), [text(length, seed=length) for length in (6, 2, 4)]
    ids, mask = pad_left(questions)
    for given in ({}, {"attention_mask": mask}):
        cache = read(model, book)
        cache.batch_repeat_interleave(3)
        results = generate(model, ids, cache=cache, prefill_chunk_size=size, **given)
        for question, result in zip(questions, results, strict=True):
            assert torch.equal(result[None, 6:], greedy(model, torch.cat([book[0], question])[None]))


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_return_sequences=3, do_sample=True)], ids=str)
def test_beams_and_samples_of_new_tokens_share_a_memory(model, options):
    ids, results = text(2, 16), []
    for given in (ids, ids[:, 11:]):
        cache = read(model, ids[:, :11])
        cache.batch_repeat_interleave(3)
        torch.manual_seed(3)
        results.append(generate(model, given, cache=cache, **options))
    assert torch.equal(results[0][:, 16:], results[1][:, 5:])
    torch.manual_seed(3)
    assert torch.equal(results[0], generate(model, ids, **options))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_more_new_tokens_than_were_read_are_all_read(tiny_model, kind, monkeypatch):
    warnings = []
    monkeypatch.setattr(generation_hope.logger, "warning_once", warnings.append)
    model, ids = tiny_model(torch.float64), text(2, 16)
    cache = read(model, ids[:, :5], StaticCache(model.config, max_cache_len=40) if kind == "static" else None)
    result = generate(model, ids[:, 5:], cache=cache)
    assert torch.equal(result[:, 11:], greedy(model, ids)) and len(warnings) == 1
    cache.reset()
    assert torch.equal(generate(model, ids, cache=read(model, ids[:, :5], cache))[:, 16:], greedy(model, ids))
    assert len(warnings) == 1


def test_what_a_cache_has_read_is_no_new_text(tiny_model):
    model, ids = tiny_model(torch.float64), text(2, 9)
    with pytest.raises(ValueError, match="attention_mask of 18 columns"):
        generate(model, ids, cache=read(model, ids))
    twice = generate(model, ids, cache=read(model, ids), attention_mask=torch.ones(2, 18, dtype=torch.long))
    assert torch.equal(twice[:, 9:], greedy(model, torch.cat([ids, ids], dim=1)))


def test_a_text_of_embeddings_is_told_from_new_tokens_by_its_length(tiny_model):
    model, ids = tiny_model(torch.float64), text(2, 16)
    embeddings = model.get_input_embeddings()(ids)
    expected = greedy(model, ids)

    def cache():
        return read(model, None, inputs_embeds=embeddings[:, :9])

    assert torch.equal(generate(model, None, inputs_embeds=embeddings), expected)
    for inputs in ({"input_ids": ids}, {"input_ids": ids[:, 9:]}, {"inputs_embeds": embeddings}):
        result = generate(model, None, cache=cache(), **inputs)
        assert torch.equal(result[:, -NEW:], expected)
    with pytest.raises(ValueError, match="inputs_embeds"):
        generate(model, None, inputs_embeds=embeddings[:, 9:], cache=cache())


def test_keys_that_are_quantised_are_read_on(tiny_model):
    """Such a layer holds no keys as they are, whose rows could be counted."""
    model, ids = tiny_model(**STATES["attention"]), text(2, 8)
    options = dict(cache_implementation="quantized", cache_config={"backend": "fp8"})
    assert generate(model, ids, **options)[:, 8:].shape == greedy(model, ids).shape


def test_a_static_memory_stays_where_it_is(tiny_model):
    """A graph that is replayed on a GPU reads and writes the addresses it was recorded with."""
    model, places = tiny_model(), []
    cache = StaticCache(model.config, max_cache_len=20)
    # the first part ends where a chunk does
    for part in text(2, 12).split([8, 1, 3], dim=1):
        read(model, part, cache)
        held = cache.layers[0].named_tensors() | {"columns": cache.layers[0].past.columns}
        places.append({name: tensor.data_ptr() for name, tensor in held.items()})
    assert places[0] and places[0] == places[1] == places[2]
    assert len(set(places[0].values())) == len(places[0]), "two of them share their memory"


def test_positions_made_by_generate_count_real_tokens(model, calls):
    """Left padding must not look like a document that begins in the middle of the row."""
    ids, mask = pad_left([text(8), text(3)])
    generate(model, ids, attention_mask=mask, max_new_tokens=3)
    first, *later = (call["position_ids"].expand(2, -1).tolist() for call in calls)
    assert first[0] == list(range(8)) and first[1][-3:] == [0, 1, 2]
    assert later == [[[8], [3]], [[9], [4]]]


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 5, 6])], ids=str)
def test_logits_to_keep(tiny_model, kept):
    model, ids = tiny_model(torch.float64), text(2, 9)
    wanted = kept if isinstance(kept, torch.Tensor) else torch.arange(9 - kept, 9)
    some, every = model(ids, logits_to_keep=kept).logits, model(ids).logits
    torch.testing.assert_close(some, every[:, wanted], rtol=1e-12, atol=1e-12)


def test_a_cache_may_have_its_older_name(model):
    ids, more, old = text(1, 9), text(1, 4, seed=1), {}
    for name in ("cache", "past_key_values"):
        cache = HopeCache(model.config)
        # transformers says so from the release on that renamed it
        warned = pytest.warns(FutureWarning, match="Use `cache`") if name != CACHE_NAME == "cache" else nullcontext()
        with warned:
            model(ids, **{name: cache})
        with warned:
            model.model(more, **{name: cache})
        with warned:
            old[name] = generate(model, torch.cat([ids, more, ids], dim=1), max_new_tokens=3, **{name: cache})
        assert cache.get_seq_length() == 24
    assert torch.equal(*old.values())
