"""Documents that share a row, and padding, in every way that callers tell them: all read as each document alone."""

import pytest
import torch
import torch.nn.functional as F
from mixers import ATTENTION, STATES, random_ids
from transformers import AttentionInterface, DataCollatorWithFlattening
from transformers.integrations.sdpa_attention import sdpa_attention_forward

EXACT = dict(rtol=1e-9, atol=1e-9)
LENGTHS = (5, 9, 1, 6)
STARTS = torch.tensor([0, 5, 14, 15, 21], dtype=torch.int32)


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


def positions_of(numbers):
    """Positions [B, T] in the documents that `numbers` names; 0 for padding."""
    earlier = (numbers[:, :, None] == numbers[:, None]).tril(-1).sum(2)
    return earlier * (numbers > 0)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_packed_rows_with_padding_read_as_their_documents_alone(model, side):
    """Two documents a row; the padding belongs to the document beside it, or to none."""
    ids = []
    numbers = []
    for one, two in (DOCUMENTS[:2], DOCUMENTS[2:]):
        row = torch.cat([one, two], 1)
        number = torch.tensor([[1] * one.shape[1] + [2] * two.shape[1]])
        missing = 16 - row.shape[1]
        padding = (missing, 0) if side == "left" else (0, missing)
        ids.append(F.pad(row, padding))
        numbers.append(F.pad(number, padding))
    ids, numbers = torch.cat(ids), torch.cat(numbers)
    mask = (numbers > 0).long()
    beside = torch.where(numbers > 0, numbers, 1 if side == "left" else 2)
    starts = (beside.flatten().diff() != 0).nonzero().flatten() + 1
    ways = {
        "mask of numbers": {"attention_mask": numbers},
        "as floats": {"attention_mask": numbers.double()},
        "seq_idx": {"attention_mask": mask.bool(), "seq_idx": beside.int()},
        "seq_idx of padding": {"attention_mask": mask, "seq_idx": numbers.int()},
        "cu_seq_lens": {"attention_mask": mask, "cu_seq_lens_q": torch.tensor([0, *starts.tolist(), 32])},
        "positions": {"attention_mask": mask, "position_ids": positions_of(numbers)},
    }
    expected = alone(model)
    for name, way in ways.items():
        assert_equal(model(ids, use_cache=True, **way).logits[mask.bool()], expected, name)


@torch.no_grad()
def test_a_document_may_begin_with_padding(model):
    one, two = DOCUMENTS[:2]
    ids = torch.cat([one, F.pad(two, (2, 0))], 1)
    mask = (ids != 0).long()
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


