"""Whether the machine's memory holds the model as every process builds it, asked before any does."""

import socket

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedModel

from ..engines.base import Engine
from ..engines.placement import GIB, free_memory


def check_host_memory(model: PreTrainedModel, engine: Engine) -> None:
    """ValueError on all processes where one machine's memory is too small for what its processes are about to build.

    `model`: on the meta device.
    """
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
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
            f"{processes * size / GIB:.1f} GiB of its memory, and {free / GIB:.1f} GiB are free; {mend}."
        )
