"""Fully sharded data parallelism of torch, version 2: every process holds rows of each parameter."""

import math

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.process import warn_once
from hope_hf.optim import LevelClock, own_part
from hope_hf.plan import Launch, fsdp_strategy

from .base import Engine, EngineOptions, Slice, is_on_meta


class FSDP2(Engine):
    """`fully_shard` by transformer block or by size, as the launch file sets; also in hybrid meshes."""

    fills_shards = True
    shards_weights = True
    autocasts = False

    def __init__(self, accelerator: Accelerator, options: EngineOptions):
        super().__init__(accelerator)
        launch = self.launch()
        self.name = f"FSDP2, {launch.replicas} replicas" if launch.replicas > 1 else "FSDP2"
        self.whole_gradients = launch.whole_gradients(getattr(torch, options.fsdp_reduce_dtype))
        if launch.strategy.offloads:
            self.name += ", offloaded to the CPU"
        self._prefetch = options.fsdp_prefetch
        if options.init == "sharded" and accelerator.state.fsdp_plugin.cpu_ram_efficient_loading:
            warn_once("fsdp_cpu_ram_efficient_loading in the launch file is ignored: --init sharded decides.")
            accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
        if not options.fsdp_limit_all_gathers:
            warn_once("--fsdp_limit_all_gathers is ignored: it is a setting of FSDP's version 1.")
        if accelerator.mixed_precision != "no":
            # By default accelerate would reduce gradients in the low precision too.
            accelerator.state.fsdp_plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=LOW_PRECISION[accelerator.mixed_precision], reduce_dtype=self.whole_gradients
            )

    def launch(self) -> Launch:
        plugin, mesh = self.accelerator.state.fsdp_plugin, self.accelerator.torch_device_mesh
        replicas = 1
        if mesh is not None and "dp_replicate" in mesh.mesh_dim_names:
            replicas = mesh["dp_replicate"].size()
        offloads = isinstance(plugin.cpu_offload, CPUOffloadPolicy)
        strategy = fsdp_strategy(False, not plugin.reshard_after_forward, replicas, offloads)
        return self._launch(strategy, self.accelerator.num_processes // replicas, plugin.activation_checkpointing)

    def prepare(self, model: PreTrainedModel, optimizer: LevelClock) -> nn.Module:
        plugin = self.accelerator.state.fsdp_plugin
        if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
            # accelerate would wrap lists of modules too, and fail.
            plugin.auto_wrap_policy = transformer_auto_wrap_policy
            plugin.transformer_cls_names_to_wrap = classes_by_size(model, plugin.min_num_params)
        super().prepare(model, optimizer)
        assert isinstance(self.wrapped, FSDPModule)
        # Sharded in place.
        self.model = self.wrapped
        if is_on_meta(model):
            self._make_shards_real()
        self._order_prefetching()
        return self.wrapped

    def _make_shards_real(self):
        """Give the shards of a model on the meta device memory, without values, and the optimizer these shards."""
        offloads = bool(self.launch().strategy.offloads)
        device = torch.device("cpu") if offloads else self.accelerator.device
        self.wrapped._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        self.wrapped.tie_weights()
        # accelerate distinguishes parameters by their addresses, which are all 0 on the meta device.
        real = dict(self._state())
        for names, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            group["params"] = [real[name] for name in names]

    def _order_prefetching(self):
        """`--fsdp_prefetch`: every block gathers the next ones while it computes, in both directions."""
        if not self._prefetch:
            return
        blocks = self._units()
        blocks.remove(self.wrapped)
        for index, block in enumerate(blocks):
            following = blocks[index + 1 : index + 1 + self._prefetch]
            before = blocks[max(0, index - self._prefetch) : index]
            block.set_modules_to_forward_prefetch(following)
            block.set_modules_to_backward_prefetch(before[::-1])

    def reduce_dtype(self, name: str) -> torch.dtype | None:
        # Whole gradients are accumulated in the dtype of their reduction.
        return self.whole_gradients

    def local_gradients(self) -> list[Tensor]:
        gradients = super().local_gradients()
        # Whole gradients do not belong to the sharded parameters.
        for unit in self._units():
            group = unit._get_fsdp_state()._fsdp_param_group
            for sharded in [] if group is None else group.fsdp_params:
                # The first forward pass creates it.
                whole = getattr(sharded, "_unsharded_param", None)
                for gradient in (sharded.unsharded_accumulated_grad, None if whole is None else whole.grad):
                    if gradient is not None:
                        gradients.append(gradient)
        return gradients

    def _units(self) -> list[FSDPModule]:
        return [module for module in self.wrapped.modules() if isinstance(module, FSDPModule)]

    def _slice(self, names: tuple[str, ...], tensor: Tensor, values: dict[str, Tensor]) -> Slice:
        if not isinstance(tensor, DTensor):
            return super()._slice(names, tensor, values)
        start, is_copy = _place(tensor)
        flat = {key: own_part(value).view(-1) for key, value in values.items()}
        return Slice(names, tensor.shape, start, flat, is_copy)

    def _gathered(self, norm: Tensor) -> Tensor:
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _place(tensor: DTensor) -> tuple[int, bool]:
    """The start of this process's slice in the flattened tensor, and whether another process writes it."""
    (chunk,) = tensor.__create_chunk_list__()
    assert chunk.sizes[1:] == tensor.shape[1:], "shared out along another axis than the first"
    # In a hybrid mesh several processes hold the same slice; the first one writes it.
    mesh = tensor.device_mesh
    is_copy = False
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate() and mesh.get_local_rank(axis) > 0:
            is_copy = True
    return chunk.offsets[0] * math.prod(tensor.shape[1:]), is_copy


def classes_by_size(model: PreTrainedModel, least: int) -> list[str]:
    """Names of classes with an instance of more than `least` parameters: the model's blocks and their parts.

    Not included are memories' initial states, which are used outside of their own forward pass, and torch's own
    classes, which have instances of all sizes.
    """
    names = set()
    for block in model.modules():
        if type(block).__name__ not in (model._no_split_modules or ()):
            continue
        for module in block.modules():
            is_foreign = type(module).__module__.startswith("torch.") or getattr(module, "is_initial_state", False)
            if not is_foreign and sum(parameter.numel() for parameter in module.parameters()) > least:
                names.add(type(module).__name__)
    return sorted(names)
