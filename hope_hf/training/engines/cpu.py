"""FSDP and DeepSpeed on CPUs with gloo, which accelerate and torch silently switch off there.

This is for tests, and for trying out a launch: the same code runs as on GPUs. With an accelerator it is not used.
`choose.make_engine` checks afterwards that the selected engine is the one that runs.
"""

import os
from dataclasses import replace

import torch
from accelerate import Accelerator, ParallelismConfig, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hope_hf.common.process import local_processes


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


def leave_out_communication():
    """Keep DeepSpeed from compiling its own all-reduce for CPUs at the first start on a machine, which takes minutes.

    Only tensor-parallel inference calls it: training reduces through gloo.
    """
    _name_device()
    from deepspeed.accelerator import get_accelerator
    from deepspeed.ops import __compatible_ops__

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is not None:
        __compatible_ops__[builder.NAME] = False


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
