"""`generate()` against loops written by hand that read the whole text anew for every token."""

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
from mixers import LAYERS, MEMORIES
from transformers import StaticCache

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.model import generation_hope
from hope_hf.model.cache_file import named_tensors
from hope_hf.model.cache_hope import CACHE_NAME

MODELS = LAYERS | {"paper-2": MEMORIES["paper-2"]}
NEW = 11


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request, tiny_model):
    return tiny_model(torch.float64, **request.param)


@pytest.fixture(params=LAYERS.values(), ids=LAYERS.keys())
def either(request, tiny_model):
    return tiny_model(torch.float64, **request.param)


def text(*shape, seed=5):
    return torch.randint(1, 64, shape, generator=torch.Generator().manual_seed(seed))


def generate(model, ids, **options):
    options = {"do_sample": False, "max_new_tokens": NEW, "pad_token_id": 0, **options}
    with torch.no_grad():
        return model.generate(ids, **options)


def next_logits(model, ids):
    with torch.no_grad():
        return model(ids, use_cache=False).logits[:, -1]


def greedy(model, ids, num_tokens=NEW):
    for _ in range(num_tokens):
        ids = torch.cat([ids, next_logits(model, ids).argmax(-1, keepdim=True)], dim=1)
    return ids


def pad_left(rows):
    longest = max(len(row) for row in rows)
    ids, mask = torch.zeros(2, len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, longest - len(row) :], mask[index, longest - len(row) :] = row, 1
    return ids, mask


def test_greedy_equals_a_loop_without_cache(model):
    ids = text(2, 13)
    expected = greedy(model, ids)
    assert len(set(expected[:, 13:].flatten().tolist())) > 3
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)


def test_generate_reads_every_token_once(either, monkeypatch):
    widths = []
    forward = HopeForCausalLM.forward

    # generate reads the signature to know which arguments the model takes
    def record(self, *args, **kwargs):
        widths.append(kwargs["input_ids"].shape[1])
        return forward(self, *args, **kwargs)

    record.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(HopeForCausalLM, "forward", record)
    generate(either, text(1, 13))
    assert widths == [13] + [1] * (NEW - 1)


def test_generation_stops_at_the_end_of_sequence_row_by_row(model):
    ids = text(3, 9)
    free = greedy(model, ids)[:, 9:]
    end = free[0, 4].item()
    stopped = generate(model, ids, eos_token_id=end)[:, 9:]
    for row, expected in zip(stopped, free, strict=True):
        length = (expected == end).nonzero()[0].item() + 1 if (expected == end).any() else NEW
        assert torch.equal(row[:length], expected[:length])
        assert not row[length:].any()


@pytest.mark.parametrize("options", [dict(top_k=0), dict(top_k=5, temperature=0.7)], ids=str)
def test_sampling_draws_from_the_distribution_of_a_loop_without_cache(model, options):
    ids = text(2, 10)
    torch.manual_seed(7)
    sampled = generate(model, ids, do_sample=True, **options)
    torch.manual_seed(7)
    expected = ids
    for _ in range(NEW):
        scores = next_logits(model, expected) / options.get("temperature", 1.0)
        if options["top_k"]:
            smallest = scores.topk(options["top_k"]).values[:, -1:]
            scores = scores.masked_fill(scores < smallest, float("-inf"))
        expected = torch.cat([expected, torch.multinomial(scores.softmax(-1), 1)], dim=1)
    assert torch.equal(sampled, expected)
    torch.manual_seed(8)
    assert not torch.equal(generate(model, ids, do_sample=True, **options), sampled)


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
    return beams


def test_beam_search_equals_a_search_without_cache(either):
    ids = text(2, 10, seed=1)
    found = generate(either, ids, num_beams=3, num_return_sequences=3)
    assert found.shape == (6, 10 + NEW)
    for row in range(2):
        expected = torch.cat([beam for _, beam in beam_search(either, ids[row : row + 1], 3)])
        assert torch.equal(found[3 * row : 3 * row + 3], expected)
    assert not torch.equal(found[::3], greedy(either, ids))


@pytest.mark.parametrize("options", [{}, dict(num_beams=3)], ids=["greedy", "beams"])
def test_left_padded_rows_generate_what_they_do_alone(model, options):
    rows = [text(length, seed=length) for length in (17, 3, 8, 1)]
    ids, mask = pad_left(rows)
    together = generate(model, ids, attention_mask=mask, **options)[:, ids.shape[1] :]
    for row, generated in zip(rows, together, strict=True):
        alone = generate(model, row[None], **options)[0, len(row) :]
        assert torch.equal(generated, alone)


def test_generation_continues_from_a_cache(model):
    ids = text(2, 14)
    expected = greedy(model, ids)
    for given in (ids, ids[:, 9:]):
        cache = HopeCache(model.config)
        with torch.no_grad():
            model(ids[:, :9], cache=cache)
        mask = torch.ones_like(ids)
        result = generate(model, given, attention_mask=mask, cache=cache)
        assert torch.equal(result[:, -NEW:], expected[:, -NEW:])
        assert cache.get_seq_length() == ids.shape[1] + NEW - 1


def read(model, ids, cache=None, **inputs):
    cache = HopeCache(model.config) if cache is None else cache
    with torch.no_grad():
        model(ids, cache=cache, **inputs)
    return cache


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask of the new tokens"])
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_new_tokens_alone_continue_a_cache(model, masked, kind):
    ids = text(2, 16, seed=1)
    new = ids[:, 11:]
    cache = read(model, ids[:, :11], StaticCache(model.config, max_cache_len=40) if kind == "static" else None)
    mask = dict(attention_mask=torch.ones_like(new)) if masked else {}
    result = generate(model, new, cache=cache, **mask)
    assert torch.equal(result, torch.cat([new, greedy(model, ids)[:, 16:]], dim=1))
    # a first token taken for a document's beginning would read the same as no memory
    assert not torch.equal(result, greedy(model, new))


@pytest.fixture(params=["this transformers", "before 5.21"])
def chunked_by(request, monkeypatch):
    """Who cuts a prefill after a cache into chunks: transformers, or what stands in for it in older versions."""
    if request.param == "before 5.21":
        monkeypatch.setattr(generation_hope, "_CHUNKS_FOLLOW_A_CACHE", False)


@pytest.mark.usefixtures("chunked_by")
def test_a_prefill_in_chunks_follows_a_cache(either):
    # padding, as newer versions leave a mask of ones out
    ids, mask = pad_left([text(17), text(16)])
    expected = generate(either, ids, attention_mask=mask)
    for given in (ids, ids[:, 9:]):
        cache = read(either, ids[:, :9], attention_mask=mask[:, :9])
        result = generate(either, given, attention_mask=mask, cache=cache, prefill_chunk_size=3)
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
            assert torch.equal(
                result[6:], greedy(model, torch.cat([book[0], question])[None])[0, 11 + len(question) :]
            )


@pytest.mark.parametrize("options", [dict(num_beams=3), dict(num_return_sequences=3, do_sample=True)], ids=str)
def test_beams_and_samples_of_new_tokens_share_a_memory(either, options):
    ids = text(2, 16)
    results = []
    for given in (ids, ids[:, 11:]):
        cache = read(either, ids[:, :11])
        cache.batch_repeat_interleave(3)
        torch.manual_seed(3)
        results.append(generate(either, given, cache=cache, **options))
    assert torch.equal(results[0][:, 16:], results[1][:, 5:])
    torch.manual_seed(3)
    assert torch.equal(results[0], generate(either, ids, **options))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_more_new_tokens_than_were_read_are_all_read(tiny_model, kind, monkeypatch):
    warnings = []
    monkeypatch.setattr(generation_hope.logger, "warning_once", warnings.append)
    model, ids = tiny_model(torch.float64), text(2, 16)
    cache = read(model, ids[:, :5], StaticCache(model.config, max_cache_len=40) if kind == "static" else None)
    result = generate(model, ids[:, 5:], cache=cache)
    assert torch.equal(result[:, 11:], greedy(model, ids)[:, 16:])
    assert ["11 tokens does not begin with the 5 that" in warning for warning in warnings] == [True]
    cache.reset()
    assert torch.equal(generate(model, ids, cache=read(model, ids[:, :5], cache)), greedy(model, ids))
    assert len(warnings) == 1


def test_what_a_cache_has_read_is_no_new_text(tiny_model):
    model, ids = tiny_model(torch.float64), text(2, 9)
    with pytest.raises(ValueError, match="the input is the 9 tokens.*read.*attention_mask of 18 columns"):
        generate(model, ids, cache=read(model, ids))
    twice = generate(model, ids, cache=read(model, ids), attention_mask=torch.ones(2, 18, dtype=torch.long))
    assert torch.equal(twice[:, 9:], greedy(model, torch.cat([ids, ids], dim=1))[:, 18:])


def test_a_text_of_embeddings_is_told_from_new_tokens_by_its_length(tiny_model):
    model, ids = tiny_model(torch.float64), text(2, 16)
    embeddings = model.get_input_embeddings()(ids)

    def cache():
        with torch.no_grad():
            filled = HopeCache(model.config)
            model(inputs_embeds=embeddings[:, :9], cache=filled)
        return filled

    expected = greedy(model, ids)[:, 16:]
    for inputs in ({"input_ids": ids}, {"input_ids": ids[:, 9:]}, {"inputs_embeds": embeddings}):
        filled = cache()
        result = generate(model, None, cache=filled, **inputs)
        assert torch.equal(result[:, -NEW:], expected)
        assert filled.get_seq_length() == 16 + NEW - 1
    with pytest.raises(ValueError, match="inputs_embeds holds 7 tokens, and the cache has read 9"):
        generate(model, None, inputs_embeds=embeddings[:, 9:], cache=cache())


def test_a_whole_text_is_known_however_its_rows_were_moved(tiny_model):
    model, ids = tiny_model(torch.float64), text(3, 12)
    cache = HopeCache(model.config)
    for part in ids[:, :9].split([1, 5, 3], dim=1):
        read(model, part, cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    result = generate(model, ids[[2, 0]], cache=cache)
    assert torch.equal(result, greedy(model, ids[[2, 0]]))


def test_a_cache_returned_by_generate_goes_on(model):
    ids, more = text(1, 9), text(1, 4, seed=6)
    first = generate(model, ids, return_dict_in_generate=True)
    assert type(first[CACHE_NAME]) is HopeCache
    conversation = torch.cat([first.sequences, more], dim=1)
    second = generate(model, conversation, cache=copy.deepcopy(first[CACHE_NAME]))
    assert torch.equal(second, greedy(model, conversation))


@pytest.mark.parametrize("size", [1, 4, 5])
def test_a_prompt_may_be_read_in_pieces(model, size):
    rows = [text(length, seed=length) for length in (14, 5)]
    ids, mask = pad_left(rows)
    whole = generate(model, ids, attention_mask=mask)
    pieces = generate(model, ids, attention_mask=mask, prefill_chunk_size=size)
    assert torch.equal(pieces, whole)


def test_a_prompt_may_be_given_as_embeddings(model):
    ids = text(2, 9)
    embeddings = model.get_input_embeddings()(ids)
    with torch.no_grad():
        generated = model.generate(inputs_embeds=embeddings, do_sample=False, max_new_tokens=NEW, pad_token_id=0)
    assert torch.equal(generated, greedy(model, ids)[:, 9:])


@pytest.mark.parametrize(
    ("layers", "implementation"),
    # offloaded keys and values need a CUDA device
    [(layers, name) for layers in LAYERS for name in ("dynamic", "static")] + [("memory", "offloaded")],
)
def test_named_caches_of_transformers(tiny_model, layers, implementation):
    model = tiny_model(torch.float64, **LAYERS[layers])
    rows = [text(length, seed=length) for length in (10, 4)]
    ids, mask = pad_left(rows)
    generated = generate(model, ids, attention_mask=mask, cache_implementation=implementation)
    for row, result in zip(rows, generated, strict=True):
        assert torch.equal(result[10:], greedy(model, row[None])[0, len(row) :])


def test_keys_that_are_quantised_are_read_on(tiny_model):
    """Such a layer holds no keys as they are, whose rows could be counted."""
    model, ids = tiny_model(**LAYERS["attention"]), text(2, 8)
    options = dict(cache_implementation="quantized", cache_config={"backend": "fp8"})
    assert generate(model, ids, **options).shape == greedy(model, ids).shape


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
@pytest.mark.parametrize("layers", LAYERS)
def test_a_static_cache_can_be_passed_to_the_model(tiny_model, layers, kernel):
    model = tiny_model(torch.float64, **LAYERS[layers])
    model.set_attn_implementation(kernel)
    ids = text(2, 12)
    cache = StaticCache(model.config, max_cache_len=20)
    with torch.no_grad():
        logits = [model(part, cache=cache).logits for part in ids.split([5, 1, 6], dim=1)]
        # transformers' eager attention takes its softmax in float32, whatever the model's dtype.
        close = 1e-6 if model.config.attention_layer is not None and kernel == "eager" else 1e-9
        torch.testing.assert_close(torch.cat(logits, dim=1), model(ids).logits, rtol=close, atol=close)


def test_a_static_memory_stays_where_it_is(tiny_model):
    """A graph that is replayed on a GPU reads and writes the addresses it was recorded with."""
    model = tiny_model()
    cache = StaticCache(model.config, max_cache_len=20)
    places = []
    # The first part ends where a chunk does.
    lengths = [8, 1, 3]
    with torch.no_grad():
        for part in text(2, 12).split(lengths, dim=1):
            model(part, cache=cache)
            held = cache.layers[0].named_tensors() | {"columns": cache.layers[0].past.columns}
            places.append({name: tensor.data_ptr() for name, tensor in held.items()})
    assert places[0] and places[0] == places[1] == places[2]
    assert len(set(places[0].values())) == len(places[0]), "two of them share their memory"


def test_positions_made_by_generate_count_real_tokens(either, monkeypatch):
    """Left padding must not look like a document that begins in the middle of the row."""
    rows = [text(length, seed=length) for length in (8, 3)]
    ids, mask = pad_left(rows)
    seen = []
    forward = HopeForCausalLM.forward

    def record(self, *args, **kwargs):
        seen.append(kwargs.get("position_ids"))
        return forward(self, *args, **kwargs)

    record.__signature__ = inspect.signature(forward)
    monkeypatch.setattr(HopeForCausalLM, "forward", record)
    generate(either, ids, attention_mask=mask, max_new_tokens=3)
    first = seen[0].expand(2, -1)
    for row, positions in zip(rows, first, strict=True):
        assert positions[-len(row) :].tolist() == list(range(len(row)))
    assert [positions.expand(2, -1).squeeze(1).tolist() for positions in seen[1:]] == [[8, 3], [9, 4]]


@pytest.mark.parametrize("kept", [1, 3, torch.tensor([0, 5, 6])], ids=str)
def test_logits_to_keep(model, kept):
    ids = text(2, 9)
    every = model(ids).logits
    some = model(ids, logits_to_keep=kept).logits
    wanted = kept if isinstance(kept, torch.Tensor) else torch.arange(9 - kept, 9)
    torch.testing.assert_close(some, every[:, wanted], rtol=1e-12, atol=1e-12)


def test_a_cache_may_have_its_older_name(model):
    ids, more, old = text(1, 9), text(1, 4, seed=1), {}
    for name in ("cache", "past_key_values"):
        cache = HopeCache(model.config)
        # transformers says so from the release on that renamed it
        told = pytest.warns(FutureWarning, match="Use `cache`") if name != CACHE_NAME == "cache" else nullcontext()
        with told:
            model(ids, **{name: cache})
        with told:
            model.model(more, **{name: cache})
        with told:
            old[name] = generate(model, torch.cat([ids, more, ids], dim=1), max_new_tokens=3, **{name: cache})
        assert cache.get_seq_length() == 24
    assert torch.equal(*old.values())


def test_rows_of_a_cache_can_be_selected_and_repeated(model):
    ids, rest = text(3, 11), text(3, 6, seed=9)
    with torch.no_grad():
        whole = model(torch.cat([ids, rest], dim=1)).logits[:, 11:]
        filled = HopeCache(model.config)
        model(ids, cache=filled)
        for change, rows in (
            (lambda cache: cache.batch_select_indices(torch.tensor([2, 0])), [2, 0]),
            (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
            (lambda cache: cache.reorder_cache(torch.tensor([1, 1, 0])), [1, 1, 0]),
        ):
            cache = copy.deepcopy(filled)
            change(cache)
            logits = model(rest[rows], cache=cache).logits
            torch.testing.assert_close(logits, whole[rows], rtol=1e-9, atol=1e-9)


def test_a_cache_can_be_reset(tiny_model):
    model = tiny_model(torch.float64)
    ids = text(2, 11)
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(text(2, 7, seed=8), cache=cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        assert torch.equal(model(ids, cache=cache).logits, model(ids).logits)


def test_a_copied_cache_is_a_fork(model):
    ids = text(1, 11)
    with torch.no_grad():
        cache = HopeCache(model.config)
        model(ids, cache=cache)
        fork = copy.deepcopy(cache)
        model(text(1, 5, seed=8), cache=fork)
        after = text(1, 4, seed=9)
        expected = model(torch.cat([ids, after], dim=1)).logits[:, 11:]
        torch.testing.assert_close(model(after, cache=cache).logits, expected, rtol=1e-9, atol=1e-9)


def test_a_layer_moved_away_and_back_holds_the_same_state(tiny_model):
    model = tiny_model()
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(text(2, 11), cache=cache)
    layer = cache.layers[0]
    before = {name: tensor.clone() for name, tensor in named_tensors(layer.state).items()}
    layer.offload()
    assert {tensor.device.type for tensor in named_tensors(layer.state).values()} == {"cpu"}
    layer.prefetch()
    assert {tensor.device for tensor in named_tensors(layer.state).values()} == {layer.device}
    assert all(torch.equal(tensor, before[name]) for name, tensor in named_tensors(layer.state).items())
    # to a device where nothing is computed, to see that every tensor is moved
    layer.device = torch.device("meta")
    layer.prefetch()
    assert {tensor.device.type for tensor in named_tensors(layer.state).values()} == {"meta"}


def test_what_a_memory_cannot_do_is_refused(tiny_model):
    model = tiny_model()
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(text(1, 5), cache=cache)
    with pytest.raises(RuntimeError, match="cannot unread tokens"):
        cache.layers[0].crop(3)
    with pytest.raises(RuntimeError, match="no keys and values"):
        cache.layers[0].update(None, None)
    with pytest.raises(ValueError, match="stateful"):
        generate(model, text(1, 5), prompt_lookup_num_tokens=2)
