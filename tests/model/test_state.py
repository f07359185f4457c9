"""What a model carries from token to token: cut anywhere, padded, packed or reordered, a text reads the same."""

import pytest
import torch
from mixers import ATTENTION, HYBRID, MEMORIES, SPARSE, SPARSE_HYBRID, WINDOW, WINDOW_HYBRID
from transformers import DynamicCache, StaticCache

from hope_hf import HopeCache

MEMORIES = {
    **MEMORIES,
    "one-made": dict(memory_projections=["v"], memory_chunk_size=5),
}
OTHERS = {
    "sparse": SPARSE,
    "sparse-hybrid": SPARSE_HYBRID,
    "window": WINDOW,
    "window-hybrid": WINDOW_HYBRID,
    "window-many-sinks": WINDOW | dict(attention_sinks=9),
    "window-alone": WINDOW | dict(attention_sinks=0),
}
# what can be told of documents and padding without positions
TOLD = MEMORIES | OTHERS
MIXERS = TOLD | {
    "hybrid": HYBRID,
    "attention-first": dict(layer_types=["full_attention", "hope_memory"]),
    "attention": ATTENTION,
}
EXACT = dict(rtol=1e-9, atol=1e-9)


def random_ids(*shape, seed=1):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
@pytest.mark.parametrize("prefix", [1, 3, 8, 13, 29])
def test_prefill_and_decode_equal_one_pass(tiny_model, options, prefix):
    model = tiny_model(torch.float64, **options)
    ids = random_ids(2, 30)
    whole = model(ids, use_cache=False).logits
    cache = HopeCache(model.config)
    parts = [model(ids[:, :prefix], cache=cache).logits]
    parts += [model(ids[:, t : t + 1], cache=cache).logits for t in range(prefix, 30)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
def test_uneven_calls_equal_one_pass(tiny_model, options):
    model = tiny_model(torch.float64, **options)
    ids = random_ids(2, 41)
    whole = model(ids).logits
    cache = HopeCache(model.config)
    parts = [model(part, cache=cache).logits for part in ids.split([2, 9, 1, 17, 5, 7], dim=1)]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)


def test_decode_agrees_in_bfloat16(tiny_model):
    model = tiny_model(torch.bfloat16)
    ids = random_ids(2, 24)
    whole = model(ids).logits
    cache = HopeCache(model.config)
    parts = [model(ids[:, t : t + 1], cache=cache).logits for t in range(24)]
    assert torch.equal(torch.cat(parts, dim=1).argmax(-1), whole.argmax(-1))


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_writes_nothing(tiny_model, options, side):
    """Rows of unequal length, then decoded on with rows of unequal history."""
    model = tiny_model(torch.float64, **options)
    lengths, longest, more = [19, 7, 12], 19, 9
    ids = random_ids(3, longest + more)
    padded = torch.zeros(3, longest, dtype=torch.long)
    mask = torch.zeros(3, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        padded[row, place], mask[row, place] = ids[row, :length], 1
    cache = HopeCache(model.config)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = model(padded, attention_mask=mask, position_ids=positions, cache=cache).logits
    later = []
    for t in range(more):
        mask = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], dim=1)
        column = torch.stack([ids[row, length + t] for row, length in enumerate(lengths)])[:, None]
        positions = torch.tensor([[length + t] for length in lengths])
        later.append(model(column, attention_mask=mask, position_ids=positions, cache=cache).logits)
    later = torch.cat(later, dim=1)
    for row, length in enumerate(lengths):
        alone = model(ids[row : row + 1, : length + more]).logits[0]
        place = slice(longest - length, longest) if side == "left" else slice(0, length)
        torch.testing.assert_close(first[row, place], alone[:length], **EXACT)
        torch.testing.assert_close(later[row], alone[length:], **EXACT)


@pytest.mark.parametrize("options", TOLD.values(), ids=TOLD.keys())
def test_padding_inside_a_text_and_alone_in_a_call_writes_nothing(tiny_model, options):
    """Without positions, by which attention would have to be told."""
    model = tiny_model(torch.float64, **options)
    ids = random_ids(1, 20)
    gaps = torch.tensor([0, 3, 4, 9, 17, 25])
    mask = torch.ones(1, 26, dtype=torch.long)
    mask[0, gaps] = 0
    padded = torch.zeros(1, 26, dtype=torch.long)
    padded[mask.bool()] = ids[0]
    cache = HopeCache(model.config)
    parts, seen = [], 0
    for size in (1, 3, 1, 8, 5, 7, 1):
        columns = slice(seen, seen + size)
        seen += size
        parts.append(model(padded[:, columns], attention_mask=mask[:, :seen], cache=cache).logits)
    torch.testing.assert_close(torch.cat(parts, dim=1)[mask.bool()], model(ids).logits[0], **EXACT)


@pytest.mark.parametrize("options", TOLD.values(), ids=TOLD.keys())
def test_a_short_row_goes_on_after_a_call_of_padding_alone(tiny_model, options):
    """With fewer tokens than the convolutions reach back, so that their tail still holds what no token wrote."""
    model = tiny_model(torch.float64, **options)
    ids, mask = random_ids(3, 14), torch.ones(3, 14, dtype=torch.long)
    for row, read in enumerate((1, 2, 4)):
        mask[row, read:9] = 0
    cache, parts = HopeCache(model.config), []
    for start, stop in ((0, 4), (4, 9), (9, 14)):
        parts.append(model(ids[:, start:stop], attention_mask=mask[:, :stop], cache=cache).logits)
    logits = torch.cat(parts, dim=1)
    for row, real in enumerate(mask.bool()):
        torch.testing.assert_close(logits[row, real], model(ids[row : row + 1, real]).logits[0], **EXACT)


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
def test_packed_documents_equal_separate_rows(tiny_model, options):
    """Documents of every kind of length beside chunk boundaries; the rows are packed differently."""
    model = tiny_model(torch.float64, **options)
    lengths = [[5, 1, 16, 8, 3], [3, 20, 10], [33]]
    ids = random_ids(3, 33)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    packed = model(ids, position_ids=positions).logits
    for row, documents in enumerate(lengths):
        start = 0
        for length in documents:
            alone = model(ids[row : row + 1, start : start + length]).logits[0]
            torch.testing.assert_close(packed[row, start : start + length], alone, **EXACT)
            start += length


@pytest.mark.parametrize("options", TOLD.values(), ids=TOLD.keys())
def test_a_document_can_begin_in_a_later_call(tiny_model, options):
    """Softmax attention goes on seeing what its cache holds."""
    model = tiny_model(torch.float64, **options)
    ids = random_ids(2, 30)
    positions = torch.stack([torch.cat([torch.arange(13), torch.arange(17)]), torch.arange(30)])
    cache = HopeCache(model.config)
    parts = [
        model(ids[:, a:b], position_ids=positions[:, a:b], cache=cache).logits
        for a, b in ((0, 11), (11, 20), (20, 21), (21, 30))
    ]
    logits = torch.cat(parts, dim=1)
    torch.testing.assert_close(logits[1], model(ids[1:]).logits[0], **EXACT)
    torch.testing.assert_close(logits[0, 13:], model(ids[:1, 13:]).logits[0], **EXACT)


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
def test_rows_are_independent_and_tokens_causal(tiny_model, options):
    model = tiny_model(torch.float64, **options)
    ids = random_ids(2, 25)
    logits = model(ids).logits
    changed = ids.clone()
    changed[1, 14] = (changed[1, 14] + 1) % 64
    after = model(changed).logits
    torch.testing.assert_close(after[0], logits[0], rtol=0, atol=0)
    torch.testing.assert_close(after[1, :14], logits[1, :14], **EXACT)
    assert (after[1, 14:] - logits[1, 14:]).abs().amax(-1).min() > 1e-9


@pytest.mark.parametrize("options", MIXERS.values(), ids=MIXERS.keys())
def test_reordered_cache_continues_the_chosen_rows(tiny_model, options):
    model = tiny_model(torch.float64, **options)
    ids = random_ids(3, 22)
    cache = HopeCache(model.config)
    model(ids[:, :13], cache=cache)
    chosen = torch.tensor([2, 0, 2])
    cache.reorder_cache(chosen)
    text = torch.cat([ids[chosen, :13], ids[:, 13:]], dim=1)
    logits = model(ids[:, 13:], cache=cache).logits
    torch.testing.assert_close(logits, model(text).logits[:, 13:], **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, HYBRID, ATTENTION], ids=["plain", "hybrid", "attention"])
def test_saved_state_continues_the_text(tiny_model, tmp_path, options):
    model = tiny_model(torch.float64, **options)
    ids = random_ids(2, 22)
    cache = HopeCache(model.config)
    model(ids[:, :13], cache=cache)
    cache.save_pretrained(tmp_path, model)
    saved = [
        HopeCache.from_state_tensors(model.config, cache.state_tensors()), HopeCache.from_pretrained(tmp_path, model),
    ]  # fmt: skip
    expected = model(ids[:, 13:], cache=cache).logits
    for restored in saved:
        assert restored.get_seq_length() == 13
        torch.testing.assert_close(model(ids[:, 13:], cache=restored).logits, expected, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, HYBRID, ATTENTION], ids=["plain", "hybrid", "attention"])
def test_caches_of_transformers_carry_the_state(tiny_model, options):
    model = tiny_model(torch.float64, **options)
    ids = random_ids(2, 14)
    whole = model(ids).logits
    for cache in (DynamicCache(), DynamicCache(config=model.config), StaticCache(model.config, max_cache_len=14)):
        parts = [model(part, cache=cache).logits for part in ids.split([9, 1, 4], dim=1)]
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, **EXACT)


def test_state_does_not_grow(tiny_model):
    model = tiny_model()
    cache = HopeCache(model.config)
    sizes = []
    for part in random_ids(1, 96).split(32, dim=1):
        model(part, cache=cache)
        sizes.append(sum(tensor.numel() for tensor in cache.state_tensors().values()))
    assert len(set(sizes)) == 1


def test_detach_cuts_the_gradient_and_keeps_the_values(tiny_model):
    model = tiny_model()
    cache = HopeCache(model.config)
    model(random_ids(1, 9), cache=cache)
    before = {name: tensor.clone() for name, tensor in cache.state_tensors().items()}
    assert any(tensor.requires_grad for tensor in cache.state_tensors().values())
    cache.detach_()
    assert not any(tensor.requires_grad for tensor in cache.state_tensors().values())
    for name, tensor in cache.state_tensors().items():
        assert torch.equal(tensor, before[name])
