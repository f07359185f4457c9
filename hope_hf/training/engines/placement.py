"""Where the run is: which process has which device, which part of the model, and how much free memory."""

import socket
from collections import Counter
from collections.abc import Iterable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from hope_hf.optim import own_part
from hope_hf.step.gpus import GIB

from .base import dtype_name
from .host import free_host_memory


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a parameter or a state: its shard under FSDP2 and ZeRO-3, else all of it."""
    # ZeRO-3 empties a parameter's tensor and keeps its shard as an attribute.
    return own_part(getattr(tensor, "ds_tensor", tensor))


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of this process's parts, padding included; memory that several of them share counts once."""
    storages = (local_part(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def device_name(device: torch.device) -> str:
    """The product name of a GPU, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_memory(device: torch.device) -> int | None:
    """Free bytes on this process's device, on the CPU of its container; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def rank_lines(accelerator: Accelerator, model: nn.Module) -> list[str]:
    """One line per process, the same list on all: its place, its device, and its part of the parameters."""
    parts = [local_part(parameter) for parameter in model.parameters()]
    by_dtype = Counter()
    for part in parts:
        by_dtype[dtype_name(part.dtype)] += part.numel()
    held = ", ".join(f"{count:,} {dtype}" for dtype, count in sorted(by_dtype.items()))
    place = str(accelerator.device)
    if accelerator.device.type == "cuda":
        place += f" ({device_name(accelerator.device)})"
    if torch.distributed.is_initialized():
        place += f", {torch.distributed.get_backend()}"
    free = free_memory(accelerator.device)
    line = (
        f"{accelerator.process_index} of {accelerator.num_processes} (local {accelerator.local_process_index} on "
        f"{socket.gethostname()}): {place}, {'?' if free is None else f'{free / GIB:.1f}'} GiB free, holds {held}"
    )
    return gather_object([line])
