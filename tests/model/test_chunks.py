"""Chunks of a call: as many operators for any number of them, and one plan for all blocks of a device."""

import pytest
import torch
from accelerate.utils import send_to_device
from torch.utils._python_dispatch import TorchDispatchMode

from hope_hf import HopeConfig
from hope_hf.model.chunks import plan_chunks


class Operators(TorchDispatchMode):
    """Counts all operators that run inside, views as well."""

    number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **kwargs or {})


def test_documents_of_any_length_take_as_many_operators():
    def operators(length):
        positions = torch.cat([torch.arange(700), torch.arange(length - 700)])[None]
        with Operators() as counted:
            plan_chunks(HopeConfig(num_memory_heads=2), (1, length), torch.device("cpu"), position_ids=positions)
        return counted.number

    assert operators(32768) == operators(2048) <= 150


def tensors_in(value):
    """All tensors of a plan, its tuples and lists."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = vars(value).values() if hasattr(value, "__dict__") else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@pytest.mark.parametrize("padding", [None, 7])
def test_a_plan_moves_to_another_device_as_a_whole(padding):
    """accelerate's hooks send every argument of a block to its device."""
    mask = None if padding is None else torch.arange(20).expand(2, -1) >= padding
    plan = plan_chunks(HopeConfig(num_memory_heads=2), (2, 20), torch.device("cpu"), padding_mask=mask)
    moved = send_to_device(plan, torch.device("meta"))
    assert type(moved) is type(plan) and len(tensors_in(moved)) == len(tensors_in(plan))
    assert {tensor.device.type for tensor in tensors_in(moved)} == {"meta"}
    # one for all blocks of a device
    assert send_to_device(plan, torch.device("meta")) is moved
    assert send_to_device(plan, torch.device("cpu")) is plan
