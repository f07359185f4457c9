"""Documents that share a row, and padding, in every way that callers tell them: all read as each document alone."""

import pytest
import torch
from mixers import ATTENTION, HYBRID, STATES
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hope_hf import HopeCache, HopeForTokenClassification

EXACT = dict(rtol=1e-9, atol=1e-9)
LENGTHS = (5, 9, 1, 6)
STARTS = torch.tensor([0, 5, 14, 15, 21], dtype=torch.int32)


def random_ids(*shape, seed=1):
    return torch.randint(1, 62, shape, generator=torch.Generator().manual_seed(seed))


DOCUMENTS = [random_ids(1, length, seed=length) for length in LENGTHS]
PACKED = torch.cat(DOCUMENTS, 1)


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


@pytest.fixture(params=STATES.values(), ids=STATES)
def model(request, tiny_model):
    return tiny_model(torch.float64, **request.param)


@torch.no_grad()
def alone(model, documents=DOCUMENTS):
    return torch.cat([model(document).logits[0] for document in documents])


def assert_equal(found, expected, name):
    torch.testing.assert_close(found, expected, msg=lambda message: f"{name}: {message}", **EXACT)


@torch.no_grad()
def test_a_packed_row_reads_as_its_documents_alone(model):
    expected = alone(model)
    for name, way in WAYS.items():
        assert_equal(model(PACKED, **way).logits[0], expected, name)


@torch.no_grad()
def test_a_classifier_of_tokens_is_told_of_documents(tiny_config):
    classifier = HopeForTokenClassification(tiny_config()).double().eval()
    assert_equal(classifier(PACKED, **WAYS["cu_seq_lens"]).logits[0], alone(classifier), "classifier")


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_rows_with_padding_read_as_their_documents_alone(model, side):
    """Two documents a row; the padding belongs to the document beside it, or to none."""
    numbers = torch.zeros(2, 16, dtype=torch.long)
    ids = numbers.clone()
    for row, documents in enumerate((DOCUMENTS[:2], DOCUMENTS[2:])):
        tokens = torch.cat(documents, 1)[0]
        place = slice(16 - len(tokens), 16) if side == "left" else slice(0, len(tokens))
        ids[row, place] = tokens
        numbers[row, place] = torch.repeat_interleave(torch.tensor([part.shape[1] for part in documents])) + 1
    mask = (numbers > 0).long()
    beside = numbers.clamp(min=1) if side == "left" else torch.where(mask.bool(), numbers, 2)
    positions = torch.stack([(numbers[:, :c] == numbers[:, c : c + 1]).sum(1) for c in range(16)], 1) * mask
    cu_seq_lens = {0, 16, 32, *((beside.flatten().diff() != 0).nonzero().flatten() + 1).tolist()}
    ways = {
        "mask of numbers": {"attention_mask": numbers},
        "as floats": {"attention_mask": numbers.double()},
        "seq_idx": {"attention_mask": mask.bool(), "seq_idx": beside.int()},
        "seq_idx of padding": {"attention_mask": mask, "seq_idx": numbers.int()},
        "cu_seq_lens": {"attention_mask": mask, "cu_seq_lens_q": torch.tensor(sorted(cu_seq_lens))},
        "positions": {"attention_mask": mask, "position_ids": positions},
    }
    expected = alone(model)
    for name, way in ways.items():
        assert_equal(model(ids, use_cache=True, **way).logits[mask.bool()], expected, name)


@torch.no_grad()
def test_a_document_may_begin_with_padding(model):
    one, two = DOCUMENTS[:2]
    ids = torch.cat([one, torch.zeros(1, 2, dtype=torch.long), two], 1)
    mask = torch.tensor([[1] * 5 + [0] * 2 + [1] * 9])
    logits = model(ids, attention_mask=mask, seq_idx=torch.tensor([[0] * 5 + [1] * 11])).logits
    assert_equal(logits[mask.bool()], alone(model, (one, two)), "padding")


@torch.no_grad()
def test_kernels_without_a_mask_are_told_the_positions(tiny_model):
    """Flash attention finds packed documents in them."""
    seen = []

    def kernel(*args, position_ids=None, **kwargs):
        seen.append(position_ids)
        return sdpa_attention_forward(*args, **kwargs)

    AttentionInterface.register("told_positions", kernel)
    model = tiny_model(**ATTENTION)
    model.set_attn_implementation("told_positions")
    model(PACKED, cu_seqlens=STARTS)
    assert [positions.tolist() for positions in seen] == [[[p for n in LENGTHS for p in range(n)]]] * 2


@torch.no_grad()
def test_masks_of_four_dimensions_are_kept(tiny_model):
    model, ids = tiny_model(torch.float64, **ATTENTION), torch.cat(DOCUMENTS[:2], 1)
    block = torch.block_diag(*(torch.ones(n, n) for n in LENGTHS[:2])).tril().bool()[None, None]
    expected = alone(model, DOCUMENTS[:2])
    # eager attention takes its softmax in float32
    for kernel, tolerance in (("sdpa", 1e-9), ("eager", 1e-6)):
        model.set_attn_implementation(kernel)
        for mask in (block, block.long(), torch.zeros(block.shape).double().masked_fill(~block, -1e300)):
            logits = model(ids, attention_mask=mask).logits[0]
            torch.testing.assert_close(logits, expected, rtol=tolerance, atol=tolerance)


def test_a_row_may_begin_behind_padding_after_a_cache(tiny_model):
    """Position 0 then begins no second document."""
    model = tiny_model(torch.float64, **HYBRID).eval()
    cache, ids = HopeCache(model.config), random_ids(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :12] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for cut in (slice(0, 9), slice(9, 20)):
        seen = mask[:, : cut.stop]
        logits = model(ids[:, cut], attention_mask=seen, position_ids=positions[:, cut], cache=cache).logits
    assert_equal(logits[0, 3:], model(ids[:1, 12:]).logits[0], "row")
