"""Documents that share a row, and padding, in every way that callers tell them: all read as each document alone."""

import copy

import pytest
import torch
from mixers import LAYERS, MEMORIES
from transformers import AttentionInterface, DataCollatorWithFlattening, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hope_hf import HopeCache, HopeForTokenClassification
from hope_hf.model.cache_hope import CACHE_NAME

MODELS = LAYERS | {"paper-1": MEMORIES["paper-1"]}
EXACT = dict(rtol=1e-9, atol=1e-9)
LENGTHS = (5, 9, 1, 6)
STARTS = torch.tensor([0, 5, 14, 15, 21], dtype=torch.int32)


@pytest.fixture(params=MODELS.values(), ids=MODELS.keys())
def model(request, tiny_model):
    return tiny_model(torch.float64, **request.param)


def random_ids(*shape, seed=1):
    return torch.randint(1, 62, shape, generator=torch.Generator().manual_seed(seed))


DOCUMENTS = [random_ids(1, length, seed=length) for length in LENGTHS]


def collated(**options):
    """What transformers' collator gives, without labels."""
    collator = DataCollatorWithFlattening(return_tensors="pt", **options)
    batch = collator([{"input_ids": document[0].tolist()} for document in DOCUMENTS])
    return {name: value for name, value in batch.items() if name not in ("labels", "input_ids")}


ALONE = dict(return_position_ids=False)
WAYS = {
    "cu_seq_lens": collated(return_flash_attn_kwargs=True, **ALONE),
    "seq_idx": collated(return_seq_idx=True, **ALONE),
    "all": collated(return_flash_attn_kwargs=True, return_seq_idx=True),
    "positions-count-on": collated(return_seq_idx=True, **ALONE) | {"position_ids": torch.arange(21)[None]},
    "fla": {"cu_seqlens": torch.cat([STARTS, STARTS[-1:]])},
    "mask-of-numbers": {"attention_mask": torch.repeat_interleave(torch.tensor(LENGTHS))[None] + 1},
    "ones-and-positions": collated() | {"attention_mask": torch.ones(1, 21, dtype=torch.long)},
}


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_packed_row_reads_as_its_documents_alone(model, way):
    alone = torch.cat([model(document).logits[0] for document in DOCUMENTS])
    torch.testing.assert_close(model(torch.cat(DOCUMENTS, 1), **way).logits[0], alone, **EXACT)


@torch.no_grad()
def test_a_classifier_of_tokens_is_told_of_documents(tiny_config):
    classifier = HopeForTokenClassification(tiny_config()).double().eval()
    alone = torch.cat([classifier(document).logits[0] for document in DOCUMENTS])
    packed = classifier(torch.cat(DOCUMENTS, 1), **WAYS["cu_seq_lens"]).logits[0]
    torch.testing.assert_close(packed, alone, **EXACT)


def padded(side):
    """Two rows of the documents, with padding at one side; and every token's document, 0 for padding."""
    rows = [torch.cat(DOCUMENTS[:2], 1)[0], torch.cat(DOCUMENTS[2:], 1)[0]]
    ids, numbers = torch.zeros(2, 2, 16, dtype=torch.long)
    for row, (tokens, lengths) in enumerate(zip(rows, (LENGTHS[:2], LENGTHS[2:]), strict=True)):
        place = slice(16 - len(tokens), 16) if side == "left" else slice(0, len(tokens))
        ids[row, place] = tokens
        numbers[row, place] = torch.repeat_interleave(torch.tensor(lengths)) + 1
    return ids, numbers


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_rows_with_padding_read_as_their_documents_alone(model, side):
    ids, numbers = padded(side)
    mask = (numbers > 0).long()
    # the padding belongs to the document beside it, or to none
    beside = numbers.clamp(min=1) if side == "left" else torch.where(mask.bool(), numbers, 2)
    positions = torch.stack([(numbers[:, :c] == numbers[:, c : c + 1]).sum(1) for c in range(16)], 1) * mask
    cu_seq_lens = [0, *((beside.flatten().diff() != 0).nonzero().flatten() + 1).tolist(), 16, 32]
    ways = {
        "mask of numbers": {"attention_mask": numbers},
        "as floats": {"attention_mask": numbers.double()},
        "seq_idx": {"attention_mask": mask.bool(), "seq_idx": beside.int()},
        "seq_idx of padding": {"attention_mask": mask, "seq_idx": numbers.int()},
        "cu_seq_lens": {"attention_mask": mask, "cu_seq_lens_q": torch.tensor(sorted({*cu_seq_lens}))},
        "positions": {"attention_mask": mask, "position_ids": positions},
    }
    alone = torch.cat([model(document).logits[0] for document in DOCUMENTS])
    for name, way in ways.items():
        logits = model(ids, use_cache=True, **way).logits[mask.bool()]
        torch.testing.assert_close(logits, alone, msg=lambda text, name=name: f"{name}: {text}", **EXACT)


@torch.no_grad()
def test_a_document_may_begin_with_padding(model):
    one, two = DOCUMENTS[:2]
    ids = torch.cat([one, torch.zeros(1, 2, dtype=torch.long), two], 1)
    mask = torch.tensor([[1] * 5 + [0] * 2 + [1] * 9])
    seq_idx = torch.tensor([[0] * 5 + [1] * 11])
    logits = model(ids, attention_mask=mask, seq_idx=seq_idx).logits[0]
    torch.testing.assert_close(logits[:5], model(one).logits[0], **EXACT)
    torch.testing.assert_close(logits[7:], model(two).logits[0], **EXACT)


@torch.no_grad()
def test_kernels_without_a_mask_are_told_the_positions(tiny_model):
    """Flash attention finds packed documents in them."""
    told = []

    def kernel(*args, position_ids=None, **kwargs):
        told.append(position_ids)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("told_positions", kernel)
    model = tiny_model(**LAYERS["attention"])
    model.set_attn_implementation("told_positions")
    model(torch.cat(DOCUMENTS, 1), cu_seqlens=STARTS)
    assert [positions.tolist() for positions in told] == [[[p for n in LENGTHS for p in range(n)]]] * 2


@torch.no_grad()
def test_what_tells_documents_in_two_ways_or_not_at_all_is_refused(tiny_model):
    model, ids = tiny_model(), torch.cat(DOCUMENTS, 1)
    seq_idx, restarts = WAYS["seq_idx"]["seq_idx"], collated()["position_ids"]
    refusals = {
        "seq_idx and position_ids disagree .* token 5 of row 0": dict(seq_idx=seq_idx * 0, position_ids=restarts),
        "cu_seqlens and seq_idx disagree .* token 14 of row": dict(cu_seqlens=STARTS[[0, 1, 4]], seq_idx=seq_idx),
        "cu_seq_lens_q and attention_mask disagree": dict(cu_seq_lens_q=STARTS, attention_mask=seq_idx // 2 + 1),
        r"cu_seqlens goes from \[0\] to \[15\], .* 0 to 21, the number": dict(cu_seqlens=STARTS[:-1]),
        r"cu_seqlens goes from \[5\] to": dict(cu_seqlens=STARTS[1:]),
        "cu_seqlens goes from": dict(cu_seqlens=STARTS[[0, 2, 1, 4]]),
        r"cu_seqlens is a torch.int32 tensor of shape \(1, 5\)": dict(cu_seqlens=STARTS[None]),
        r"seq_idx has the shape \(1, 20\), and \(1, 21\) is needed": dict(seq_idx=seq_idx[:, 1:]),
    }
    for sentence, arguments in refusals.items():
        with pytest.raises(ValueError, match=sentence):
            model(ids, **arguments)
    with pytest.raises(ValueError, match="a document that goes on from one row to the next"):
        model(ids[:, :20].view(2, 10), cu_seqlens=torch.tensor([0, 5, 14, 20]))
    cache = model(ids, use_cache=True)[CACHE_NAME]
    for held in (cache, StaticCache(model.config, max_cache_len=64)):
        with pytest.raises(ValueError, match="cu_seqlens cannot tell documents to a cache that has read"):
            model(ids, cache=held, cu_seqlens=STARTS)
    with pytest.raises(ValueError, match="attention_mask cannot tell documents to a cache that has read"):
        numbers = torch.tensor([[1] * 30 + [2] * 12])
        model(ids, cache=cache, attention_mask=numbers)


@pytest.mark.parametrize("kind", LAYERS)
def test_generate_refuses_several_documents_in_a_row(tiny_model, kind):
    model, ids = tiny_model(**LAYERS[kind]), torch.cat(DOCUMENTS, 1)
    block = torch.ones(1, 1, 21, 21, dtype=torch.bool).tril()
    for way in (*WAYS.values(), collated(), {"attention_mask": block}):
        # transformers refuses fla's name, which is none of its own
        with pytest.raises(ValueError, match=r"generate goes on with one text a row|not used by.*\['cu_seqlens'\]"):
            model.generate(ids, max_new_tokens=2, pad_token_id=0, **way)


@torch.no_grad()
@pytest.mark.parametrize("kind", LAYERS)
def test_masks_that_are_not_of_padding_are_kept_or_refused(tiny_model, kind):
    model, ids = tiny_model(torch.float64, **LAYERS[kind]), torch.cat(DOCUMENTS[:2], 1)
    for wrong in (torch.full((1, 14), 0.5), torch.full((1, 14), -torch.inf), -torch.ones(1, 14, dtype=torch.long)):
        with pytest.raises(ValueError, match="attention_mask holds values from .*: give 1 for tokens"):
            model(ids, attention_mask=wrong)
    block = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS[:2])).tril().bool()[None, None]
    others = block, block.long(), torch.zeros(block.shape).double().masked_fill(~block, -1e300)
    if kind != "attention":
        for mask in (*others, block[0]):
            with pytest.raises(ValueError, match="attention_mask has the shape.*layers that keep a state"):
                model(ids, attention_mask=mask)
        return
    with pytest.raises(ValueError, match=r"\(1, 14, 14\), and sdpa takes \(batch, tokens\) or four"):
        model(ids, attention_mask=block[0])
    alone = torch.cat([model(document).logits[0] for document in DOCUMENTS[:2]])
    # eager attention takes its softmax in float32
    for kernel, tolerance in (("sdpa", 1e-9), ("eager", 1e-6)):
        model.set_attn_implementation(kernel)
        for mask in others:
            logits = model(ids, attention_mask=mask).logits[0]
            torch.testing.assert_close(logits, alone, rtol=tolerance, atol=tolerance)


@torch.no_grad()
def test_flash_attention_is_not_given_what_it_would_not_keep(tiny_model):
    model = tiny_model(**LAYERS["attention"])
    ids, numbers = padded("left")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="flash attention does not keep documents apart in a row with padding"):
        model(ids, attention_mask=numbers)
    with pytest.raises(ValueError, match=r"\(2, 1, 16, 16\), and flash_attention_2 takes \(batch, tokens\)"):
        model(ids, attention_mask=torch.ones(2, 1, 16, 16))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["memory", "attention"])
def test_a_compiled_graph_refuses_a_mask_of_numbers(tiny_model, kind):
    compiled = torch.compile(tiny_model(**LAYERS[kind]), backend="eager")
    with pytest.raises(RuntimeError, match="attention_mask must hold 0 and 1 alone"):
        compiled(torch.cat(DOCUMENTS, 1), **WAYS["mask-of-numbers"])


@pytest.mark.parametrize("kind", ["attention", "hybrid", "window", "memory"])
def test_a_document_that_begins_after_a_cache_is_kept_apart_or_refused(tiny_model, kind):
    model = tiny_model(torch.float64, **LAYERS[kind]).eval()
    cache, ids = HopeCache(model.config), random_ids(1, 20)
    positions = torch.cat([torch.arange(8), torch.arange(12)])[None]
    model(ids[:, :5], position_ids=positions[:, :5], cache=cache)
    if kind in ("attention", "hybrid"):
        for new in (slice(5, 20), slice(8, 9)):
            with pytest.raises(ValueError, match="begin a document after a cache .* 'full_attention' layers do not"):
                model(ids[:, new], position_ids=positions[:, new], cache=cache)
        return
    logits = model(ids[:, 5:], position_ids=positions[:, 5:], cache=cache).logits[:, 3:]
    torch.testing.assert_close(logits, model(ids[:, 8:]).logits, **EXACT)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["attention", "hybrid", "window", "memory"])
def test_a_cache_of_other_rows_or_keys_of_another_dtype_is_refused(tiny_model, kind):
    model = tiny_model(**LAYERS[kind]).eval()
    cache, ids = HopeCache(model.config), random_ids(2, 6)
    model(ids, cache=cache)
    with pytest.raises(ValueError, match="the cache holds 2 sequences, and the input 3: choose rows"):
        model(random_ids(3, 2), cache=cache)
    with torch.autocast("cpu", torch.bfloat16):
        model(ids, cache=copy.deepcopy(cache))
    model.to(torch.bfloat16)
    if kind in ("window", "memory"):
        # their states are float32, or become it
        assert model(ids, cache=cache).logits.isfinite().all()
        return
    with pytest.raises(ValueError, match="the cache holds torch.float32 .* computes them in torch.bfloat16: read the"):
        model(ids, cache=cache)


@pytest.mark.parametrize("kind", ["attention", "memory"])
def test_positions_of_another_shape_are_refused(tiny_model, kind):
    model = tiny_model(**LAYERS[kind]).eval()
    for positions in (torch.arange(6), torch.arange(7)[None]):
        with pytest.raises(ValueError, match=r"position_ids has the shape \((6,|1, 7)\), and \(batch, 6\)"):
            model(random_ids(2, 6), position_ids=positions)


def test_a_row_may_begin_behind_padding_after_a_cache(tiny_model):
    """Position 0 then begins no second document."""
    model = tiny_model(torch.float64, **LAYERS["hybrid"]).eval()
    cache, ids = HopeCache(model.config), random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for cut in (slice(0, 9), slice(9, 20)):
        seen = mask[:, : cut.stop]
        logits = model(ids[:, cut], attention_mask=seen, position_ids=positions[:, cut], cache=cache).logits
    torch.testing.assert_close(logits[0, 3:], model(ids[:1, 12:]).logits[0], **EXACT)
