"""Spans of chunks, computed for all chunks at once, against a loop over chunks."""

import pytest
import torch
from accelerate.utils import send_to_device
from scans import HEADS, TAPS, plan
from torch.utils._python_dispatch import TorchDispatchMode

from hope_hf import HopeConfig
from hope_hf.model.chunks import ChunkSpan, Past, _ragged_spans, plan_chunks


class Operators(TorchDispatchMode):
    """Counts all operators that run inside, views as well."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **kwargs or {})


def spans_one_by_one(chunk, tail_size, heads, valid, position, offset=None):
    spans, around = [], torch.arange(tail_size)
    for start in range(0, valid.shape[1], chunk):
        cut = slice(start, start + chunk)
        real, at = valid[:, cut], position[:, cut]
        end = (real * torch.arange(1, real.shape[1] + 1)).amax(1)
        tail_in = None
        if offset is not None and not start:
            end, tail_in = torch.where(end == 0, offset, end), (offset[:, None] + around)[..., None]
        inside = [at >= steps for steps in range(tail_size, 0, -1)] or [at.bool()]
        fields = (
            (real[:, -1] & ((at[:, -1] + 1) % chunk == 0))[:, None, None],
            ~(real[:, 0] & (at[:, 0] == 0))[:, None, None],
            torch.stack(inside, dim=1)[..., None],
            tail_in,
            (end[:, None] + around)[..., None],
        )
        fields = [None if field is None else field.repeat_interleave(heads, 0) for field in fields]
        fields[2] = fields[2].transpose(0, 1)
        spans.append(ChunkSpan(start, start + real.shape[1], *fields))
    return spans


def assert_equal(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        for found, expected in zip(one, other, strict=True):
            if isinstance(expected, torch.Tensor):
                assert found.dtype == expected.dtype and torch.equal(found, expected)
            else:
                assert found == expected


@pytest.mark.parametrize("tail_size, heads", [(3, 2), (1, 1), (0, 3)])
@pytest.mark.parametrize("chunk, slots", [(4, 32), (8, 27), (32, 5), (1, 1)])
@pytest.mark.parametrize("has_offset", [True, False])
def test_spans_equal_a_loop_over_chunks(chunk, slots, tail_size, heads, has_offset):
    generator = torch.Generator().manual_seed(chunk)
    valid = torch.rand(4, slots, generator=generator) < torch.tensor([[0.3], [0.9], [1.0], [0.0]])
    position = torch.randint(12, (4, slots), generator=generator)
    offset = torch.randint(chunk, (4,), generator=generator) if has_offset else None
    layout = chunk, tail_size, heads, valid, position, offset
    assert_equal(_ragged_spans(*layout), spans_one_by_one(*layout))


@pytest.mark.parametrize("length", [1, 37])
def test_spans_of_a_call_equal_a_loop_over_chunks(length):
    """Unequal history, padding and documents, as a model lays them out."""
    positions = torch.arange(length).repeat(3, 1) + torch.tensor([[9], [0], [2]])
    positions[2, 20:] -= 22
    mask = torch.ones(3, length).index_put((torch.tensor([0, 2]), torch.tensor([0, -1])), torch.tensor(0.0))
    past = Past(9, False, torch.tensor([9, 3, 2]), torch.zeros(3, dtype=torch.long))
    made = plan(8, 3, length, past=past, padding_mask=mask, position_ids=positions)
    assert_equal(made.spans, spans_one_by_one(8, TAPS - 1, HEADS, made.valid, made.position, made.offset))


def test_documents_of_any_length_take_as_many_operators():
    def operators(length):
        positions = torch.cat([torch.arange(700), torch.arange(length - 700)])[None]
        with Operators() as counted:
            plan_chunks(HopeConfig(num_memory_heads=2), (1, length), torch.device("cpu"), position_ids=positions)
        return counted.number

    assert operators(32768) == operators(2048) <= 150


@pytest.mark.parametrize("padded", [False, True])
def test_a_plan_moves_to_another_device_as_a_whole(padded):
    """accelerate's hooks send every argument of a block to its device."""
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    config = HopeConfig(vocab_size=8, hidden_size=16, num_hidden_layers=1, num_memory_heads=2, memory_chunk_size=8)
    made = plan_chunks(config, (2, 20), torch.device("cpu"), padding_mask=mask if padded else None)
    moved = send_to_device(made, torch.device("meta"))
    assert type(moved) is type(made) and len(moved.spans) == len(made.spans)
    names = ("valid", "position", "token_of_slot", "slot_of_token")
    tensors = [moved.past.seen, *(getattr(moved, name) for name in names), *moved.spans[0]]
    devices = {part.device.type for part in tensors if isinstance(part, torch.Tensor)}
    assert devices == {"meta"} and made.past.seen.device.type == "cpu"
    # one for all blocks of a device
    assert send_to_device(made, torch.device("meta")) is moved and send_to_device(made, torch.device("cpu")) is made
