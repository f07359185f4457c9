"""Whether the machine's memory holds the model as every process builds it, asked before any does."""

import socket
from dataclasses import replace

import torch
from accelerate.utils import gather_object
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel

from hope_hf.cli.models import build_model
from hope_hf.cli.process import MISTAKES
from hope_hf.cli.weights import weight_files
from hope_hf.step.arguments import Arguments
from hope_hf.step.gpus import GIB

from ..checkpoints.weights import WholeWeights
from ..engines.base import Engine
from ..engines.placement import free_memory
from .values import build_on_meta

# In which all models train.
DTYPE = torch.float32


def built_bytes(args: Arguments, config, continues: bool) -> int:
    """What one process takes of the memory to build the model; `continues`: a checkpoint's weights are copied into it.

    Weights that are read as they are stay in their file, of which all processes see the same pages.
    """
    if args.model_name_or_path and not continues:
        source = args.model_name_or_path
        try:
            with WholeWeights(weight_files(source, getattr(config, "transformers_weights", None), source)) as stored:
                tensors = [tensor for tensor in stored.like.values() if tensor.dtype != DTYPE]
        except MISTAKES:
            # The loading will say what is wrong with the files.
            return 0
    else:
        tensors = build_on_meta(replace(args, model_name_or_path=None), config).parameters()
    return sum(tensor.numel() for tensor in tensors) * DTYPE.itemsize


def build_fake(args: Arguments, config) -> PreTrainedModel:
    """The model on fake tensors, which take no memory and stay where they are."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build_model(replace(args, model_name_or_path=None), config)
    model.to = lambda *device: model
    return model


def is_fake(model: PreTrainedModel) -> bool:
    """Whether it comes from `build_fake`."""
    return any(isinstance(parameter, FakeTensor) for parameter in model.parameters())


def check_host_memory(size: int, engine: Engine) -> None:
    """ValueError on all processes where a machine's memory is too small for `size` bytes of each of its processes."""
    # All look before the first of them builds.
    everyone = gather_object([(socket.gethostname(), free_memory(torch.device("cpu")))])
    for host, free in everyone:
        processes = sum(other == host for other, _ in everyone)
        if free is None or processes * size <= free:
            continue
        mend = "give --init sharded"
        if not engine.fills_shards:
            mend = "launch several with accelerate_configs/fsdp2.yaml and --init sharded, or take a smaller model"
        raise ValueError(
            f"The model has {size / GIB:.1f} GiB, and {processes} process(es) on {host} build all of it: that needs "
            f"{processes * size / GIB:.1f} GiB of memory, and {free / GIB:.1f} GiB are free; {mend}."
        )
