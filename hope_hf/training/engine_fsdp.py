"""Fully sharded data parallelism of torch, version 2: every process owns a part of each parameter."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hope_hf.optim import LevelClock

from .engine import Engine, Shard, split_state


class FSDP2(Engine):
    """`fully_shard` by transformer block or by size, as the launch file says; also in hybrid meshes."""

    name = "FSDP2"
    shards_weights = True

    def __init__(self, accelerator, reduce_dtype: torch.dtype):
        super().__init__(accelerator)
        if accelerator.mixed_precision == "bf16":
            # Left alone, accelerate would reduce gradients in bfloat16 too.
            accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype
            )

    def prepare(self, model: PreTrainedModel, optimizer: LevelClock) -> nn.Module:
        super().prepare(model, optimizer)
        assert isinstance(self.wrapped, FSDPModule)
        # Sharded in place.
        self.model = self.wrapped
        return self.wrapped

    def weights(self) -> dict[str, Tensor]:
        return dict(self._whole_weights())

    def _shard(self, name: str, parameter: DTensor, state: dict[str, Tensor]) -> Shard:
        tensors, scalars = split_state(state)
        tensors = {key: tensor.to_local().view(-1) for key, tensor in tensors.items()}
        (chunk,) = parameter.__create_chunk_list__()
        assert chunk.sizes[1:] == parameter.shape[1:], f"{name} is not sharded along its first axis"
        start = chunk.offsets[0] * parameter[0].numel()
        # Of the processes that hold the same part in a hybrid mesh the first writes it.
        mesh = parameter.device_mesh
        copies = [mesh.get_local_rank(axis) for axis, place in enumerate(parameter.placements) if place.is_replicate()]
        return Shard(name, start, parameter.numel(), tensors, scalars, any(copies))

    def _gathered(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
