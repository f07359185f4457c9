"""FSDP and DeepSpeed on CPUs with gloo, which accelerate and torch silently switch off there.

This is for tests, and for trying out a launch: the same code runs as on GPUs. With an accelerator it is not used.
`choose.make_engine` checks afterwards that the selected engine is the one that runs.
"""

import os
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hope_hf.common.process import local_processes, warn_once

QUIET = 300.0
"""Seconds without a write after which a compile that no process of this machine runs has ended."""


def cpu_accelerator(wanted: str, options: dict) -> Accelerator:
    """The Accelerator of the engine `wanted` ("plain", "fsdp" or "deepspeed") on CPUs; `options` are its own."""
    _name_device()
    if wanted == "deepspeed":
        # Removed for this call: with it accelerate replaces DeepSpeed by plain replicas.
        use_cpu = os.environ.pop("ACCELERATE_USE_CPU", None)
        # Without the backend every process would run alone.
        (group,) = options["kwargs_handlers"]
        accelerator = Accelerator(**options | {"kwargs_handlers": [replace(group, backend="gloo")]})
        if use_cpu is not None:
            os.environ["ACCELERATE_USE_CPU"] = use_cpu
        return accelerator
    # Without an explicit request for the CPU, a launch by torchrun becomes WORLD_SIZE separate runs.
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if wanted == "fsdp" and several:
        return _fsdp(options)
    return Accelerator(cpu=several, **options)


def _name_device():
    """Without it DeepSpeed, which accelerate imports under every engine, looks for a GPU and prints that."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")


def compile_communication():
    """Load DeepSpeed's communication between processes on a CPU; its first start on a machine compiles it."""
    _name_device()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__
    from torch.utils import cpp_extension

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not __compatible_ops__.get(builder.NAME, False):
        return
    folder = Path(os.path.realpath(cpp_extension._get_build_directory(builder.NAME, verbose=False)))
    free_stale_lock(folder)
    if not (folder / f"{builder.NAME}.so").exists():
        warn_once(f"DeepSpeed compiles its communication for CPUs now, once, which takes minutes: {folder}.")
    builder.load()


def free_stale_lock(folder: Path):
    """Remove the lock of a compile that was killed: torch would wait for it forever.

    The folder may be shared with another machine that compiles there, so the lock must be of no process here, and
    nothing may have been written for `QUIET`.
    """
    lock = folder / "lock"
    while lock.exists() and not _is_open(lock):
        # It changes when the lock or a compiled file is made.
        if time.time() - folder.stat().st_mtime > QUIET:
            lock.unlink(missing_ok=True)
            warn_once(f"{lock} was left by a compile that was killed, and is removed.")
            return
        warn_once(
            f"{lock} is of no process of this machine: this run waits until another machine has compiled, or until "
            f"nothing was written there for {QUIET:g} s. If nothing compiles, delete it."
        )
        time.sleep(1)


def _is_open(file: Path) -> bool:
    """Linux: whether a process of this machine has the file open; else False."""
    for descriptor in Path("/proc").glob("[0-9]*/fd/*"):
        # It has been closed.
        with suppress(OSError):
            if os.readlink(descriptor) == str(file):
                return True
    return False


def _fsdp(options: dict) -> Accelerator:
    """accelerate drops the FSDP plugin on CPUs; here it is put back."""
    _stand_in_for_devices()
    plugin = FullyShardedDataParallelPlugin()
    # Without it the device is "cpu:0", and FSDP1 finds that inconsistent with "cpu".
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", "cpu")
    # Removed for this call: it would be checked against a type that is not set yet.
    hybrid = os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", "false")
    accelerator = Accelerator(cpu=True, **options)
    os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = hybrid
    if accelerator.mixed_precision != "no":
        plugin.set_mixed_precision(accelerator.mixed_precision)
    accelerator.state.fsdp_plugin = plugin
    accelerator.state.distributed_type = DistributedType.FSDP
    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    if hybrid.lower() == "true":
        parallelism = ParallelismConfig()
        accelerator.state.parallelism_config = parallelism
        accelerator.state.device_mesh = parallelism.get_device_mesh("cpu")
        parallelism._validate_accelerator(accelerator)
    return accelerator


def _stand_in_for_devices():
    """Add to torch's CPU device what it lacks: pinned memory for offloading, streams, and a device per process."""
    torch.Tensor.pin_memory = lambda self, *arguments, **keywords: self
    torch.cpu.Stream.synchronize = lambda self: None
    # FSDP1's hybrid strategy uses this as the number of processes per machine; with 1 the replicas would diverge.
    torch.cpu.device_count = local_processes
