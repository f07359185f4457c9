"""Placement of the run: the device of each process, its slices of the model, and its free memory."""

import os
import socket
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from hope_hf.common.gpus import GIB
from hope_hf.optim import own_part

from .base import Engine, dtype_name


def local_part(tensor: Tensor) -> Tensor:
    """This process's part of a parameter or a state: its shard under FSDP2 and ZeRO-3, else the whole tensor."""
    # ZeRO-3 empties a parameter's tensor and keeps its shard as an attribute.
    return own_part(getattr(tensor, "ds_tensor", tensor))


def size_in_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this process holds, padding included; memory that several tensors share counts once."""
    sizes = {}
    for tensor in tensors:
        storage = local_part(tensor).untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def device_name(device: torch.device) -> str:
    """The product name of a GPU, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_memory(device: torch.device) -> int | None:
    """Free bytes on this process's device, on the CPU of its container; None if the system does not report them."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_memory()


def rank_lines(accelerator: Accelerator, model: nn.Module) -> list[str]:
    """One line per process, the same list on all: its place, its device, and its share of the parameters."""
    by_dtype = Counter()
    for parameter in model.parameters():
        part = local_part(parameter)
        by_dtype[dtype_name(part.dtype)] += part.numel()
    counts = [f"{count:,} {dtype}" for dtype, count in sorted(by_dtype.items())]
    parts = ", ".join(counts)
    device = str(accelerator.device)
    if accelerator.device.type == "cuda":
        device += f" ({device_name(accelerator.device)})"
    if torch.distributed.is_initialized():
        device += f", {torch.distributed.get_backend()}"
    free = free_memory(accelerator.device)
    shown = "?" if free is None else f"{free / GIB:.1f}"
    line = (
        f"{accelerator.process_index} of {accelerator.num_processes} (local {accelerator.local_process_index} on "
        f"{socket.gethostname()}): {device}, {shown} GiB free, holds {parts}"
    )
    return gather_object([line])


def free_host_memory(system: Path = Path("/")) -> int | None:
    """Bytes that this process may still take; None if the system does not report them.

    Args:
        system: the folder that has `proc` and `sys`.
    """
    limits = []
    for line in _lines(system / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    for line in _lines(system / "proc/self/cgroup"):
        number, controllers, group = line.split(":", 2)
        if number == "0":
            limits += _left_below_limits(
                system / "sys/fs/cgroup", group, limit="memory.max", used="memory.current", total=""
            )
        elif "memory" in controllers.split(","):
            # Version 1, whose fields that include subgroups begin with `total_`.
            limits += _left_below_limits(
                system / "sys/fs/cgroup/memory",
                group,
                limit="memory.limit_in_bytes",
                used="memory.usage_in_bytes",
                total="total_",
            )
    return max(0, min(limits)) if limits else None


def _left_below_limits(root: Path, group: str, *, limit: str, used: str, total: str) -> Iterator[int]:
    """Bytes left below the limit of each control group, from the process's own to the outermost visible one.

    `limit`, `used`: names of files; `total`: begins the fields of `memory.stat` that include subgroups.
    """
    # In a container the group may have its name on the host; the root that is mounted here is then that group.
    path = PurePosixPath(group.lstrip("/"))
    for parent in (path, *path.parents):
        folder = root / parent
        most, now = _lines(folder / limit), _lines(folder / used)
        if not now or most in ([], ["max"]):
            continue
        # MemAvailable counts them too: the kernel drops cached pages of files before it refuses memory.
        cached = 0
        for line in _lines(folder / "memory.stat"):
            name, value = line.split(" ", 1)
            if name in (f"{total}active_file", f"{total}inactive_file"):
                cached += int(value)
        yield int(most[0]) - int(now[0]) + cached


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


HEADER = "name kind shape start end copy dtype compute reduce device trained".split()


def write_audit(folder: str | os.PathLike, engine: Engine) -> None:
    """`parameters_rank<N>.tsv`: a row for each parameter and buffer of the model, with the columns of `HEADER`.

    - name, shape: of the whole tensor, as in the unwrapped model; names of tied parameters are joined by " = ".
    - start, end: the elements of the flattened tensor that this process holds; equal if none.
    - copy: whether another process counts them; the other rows of all processes together are the model.
    - dtype: as stored; compute: in the forward pass; reduce: of gradients summed over processes, "-" for none.
    """
    file = Path(folder) / f"parameters_rank{engine.accelerator.process_index}.tsv"
    with file.open("w", encoding="utf-8") as opened:
        for row in (HEADER, *_parameters(engine), *_buffers(engine)):
            print(*row, sep="\t", file=opened)


def _parameters(engine: Engine) -> Iterator[tuple]:
    compute = engine.compute_dtype()
    for part in engine.weight_slices():
        name, values = part.names[0], part.tensors["weight"]
        if name not in engine.trained:
            continue
        dtype, trained = dtype_name(values.dtype), engine.trained[name]
        reduce = engine.reduce_dtype(name) if trained else None
        yield (
            " = ".join(part.names), "parameter", list(part.shape), part.start, part.start + values.numel(),
            part.is_copy, dtype, compute or dtype, "-" if reduce is None else dtype_name(reduce), values.device,
            trained,
        )  # fmt: skip


def _buffers(engine: Engine) -> Iterator[tuple]:
    is_copy = not engine.accelerator.is_main_process
    for name, buffer in engine.buffers().items():
        dtype = dtype_name(buffer.dtype)
        compute = dtype
        if buffer.is_floating_point() and engine.buffer_dtype() is not None:
            compute = dtype_name(engine.buffer_dtype())
        yield (
            name, "buffer", list(buffer.shape), 0, buffer.numel(), is_copy, dtype, compute, "-", buffer.device, False
        )  # fmt: skip
