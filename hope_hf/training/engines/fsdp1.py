"""Fully sharded data parallelism of torch, version 1: parameters of a block lie end to end in one flat tensor."""

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from transformers import PreTrainedModel

from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.process import warn_once
from hope_hf.optim import LevelClock
from hope_hf.plan import UNSHARDED, Launch, fsdp_strategy

from .base import Engine, EngineOptions, Slice, is_on_meta, make_real


class FSDP1(Engine):
    """All four strategies. A process holds any contiguous range of the flat tensor: slices of parameters, not rows."""

    flattens = True
    fills_shards = True
    shards_weights = True
    autocasts = False

    def __init__(self, accelerator: Accelerator, options: EngineOptions):
        """Raises ValueError without original parameters, which level clocks and weight decay need."""
        super().__init__(accelerator)
        plugin = accelerator.state.fsdp_plugin
        self._strategy = plugin.sharding_strategy
        self.name = f"FSDP1 {self._strategy.name}"
        if not plugin.use_orig_params:
            raise ValueError(
                "fsdp_use_orig_params is false: set it to true, or take version 2 (accelerate_configs/fsdp2.yaml)."
            )
        if options.init == "sharded" and plugin.sync_module_states:
            warn_once("fsdp_sync_module_states in the launch file is ignored: --init sharded decides.")
            plugin.sync_module_states = False
        if options.fsdp_prefetch:
            warn_once(
                "--fsdp_prefetch is ignored: version 1 takes fsdp_forward_prefetch and fsdp_backward_prefetch in the "
                "launch file."
            )
        if plugin.cpu_offload.offload_params and accelerator.device.type == "cpu":
            # Otherwise torch would add each step's gradients to those of the step before.
            warn_once("fsdp_offload_params is ignored: parameters are on the CPU already.")
            plugin.cpu_offload = CPUOffload(offload_params=False)
        is_mixed = accelerator.mixed_precision != "no"
        self._reduce_dtype = getattr(torch, options.fsdp_reduce_dtype) if is_mixed else torch.float32
        self.whole_gradients = self.launch().whole_gradients(self._reduce_dtype)
        if options.sync_each_batch and options.gradient_accumulation_steps > 1 and plugin.cpu_offload.offload_params:
            # It would train on the gradients of the last batch alone.
            raise ValueError(
                "--sync_each_batch: version 1 of FSDP cannot add up offloaded gradients: leave it out, or take "
                "accelerate_configs/fsdp_offload.yaml."
            )
        plugin.limit_all_gathers = options.fsdp_limit_all_gathers
        if is_mixed:
            plugin.mixed_precision_policy = MixedPrecision(
                param_dtype=LOW_PRECISION[accelerator.mixed_precision],
                reduce_dtype=self._reduce_dtype,
                buffer_dtype=torch.float32,
            )

    def launch(self) -> Launch:
        plugin, processes = self.accelerator.state.fsdp_plugin, self.accelerator.num_processes
        if self._strategy is ShardingStrategy.NO_SHARD:
            return self._launch(UNSHARDED, 1, plugin.activation_checkpointing)
        # torch shards a hybrid over the devices of a machine.
        is_hybrid = self._strategy is ShardingStrategy.HYBRID_SHARD
        parts = torch.get_device_module(self.accelerator.device).device_count() if is_hybrid else processes
        keeps = self._strategy is ShardingStrategy.SHARD_GRAD_OP
        strategy = fsdp_strategy(True, keeps, processes // parts, plugin.cpu_offload.offload_params)
        return self._launch(strategy, parts, plugin.activation_checkpointing)

    def prepare(self, model: PreTrainedModel, optimizer: LevelClock) -> nn.Module:
        # The parameters stay the same objects, whatever is wrapped around their modules.
        self._entries = list(model.state_dict(keep_vars=True).items())
        if is_on_meta(model):
            self.accelerator.state.fsdp_plugin.param_init_fn = self._make_real
        super().prepare(model, optimizer)
        units = FullyShardedDataParallel.fsdp_modules(self.wrapped)
        for unit in units:
            # Torch falls back to whole replicas with a warning; in a hybrid of one process per machine they diverge.
            if unit.sharding_strategy != self._strategy:
                raise ValueError(
                    f"fsdp_sharding_strategy {self._strategy.name} was asked for and {unit.sharding_strategy.name} "
                    "runs: launch more processes per machine, or choose FULL_SHARD."
                )
        # The start of this process's slice of each parameter, and the shape of the whole one.
        self._places = {}
        for unit in units:
            if unit._handle is None:
                continue
            flat = unit._handle.flat_param
            for parameter, info, shape in zip(flat._params, flat._shard_param_infos, flat._shapes, strict=True):
                self._places[parameter] = (info.intra_param_start_idx or 0, shape)
        between = getattr(units[0], "_inter_node_pg", None)
        self._replicas, self._is_copy = 1, False
        if self._strategy is ShardingStrategy.NO_SHARD:
            self._replicas = self.accelerator.num_processes
            self._is_copy = self.accelerator.process_index > 0
        elif between is not None:
            self._replicas = between.size()
            self._is_copy = between.rank() > 0
        return self.wrapped

    def _make_real(self, module: nn.Module) -> nn.Module:
        """Called with each module of a unit, before torch cuts the unit."""
        for parameter in module.parameters(recurse=False):
            if parameter.is_meta:
                make_real(parameter, self.accelerator.device)
        return module

    def buffer_dtype(self) -> torch.dtype | None:
        return None if self.accelerator.mixed_precision == "no" else torch.float32

    def reduce_dtype(self, name: str) -> torch.dtype:
        return self._reduce_dtype

    @torch.no_grad()
    def _scaled_norm(self, parameters: list[nn.Parameter]) -> float | None:
        # Offloaded gradients are on the CPU, and all processes must reduce on one device.
        total = torch.zeros((), device=self.accelerator.device)
        for parameter in parameters:
            if parameter.grad is not None:
                total += parameter.grad.float().square().sum().to(total.device)
        # Other processes may hold parameters of which this one holds nothing.
        return float(self.accelerator.reduce(total, "sum") / self._replicas) ** 0.5 if parameters else None

    def _state(self) -> list[tuple[str, Tensor]]:
        return self._entries

    def _slice(self, names: tuple[str, ...], tensor: Tensor, values: dict[str, Tensor]) -> Slice:
        if tensor not in self._places:
            return super()._slice(names, tensor, values)
        start, shape = self._places[tensor]
        flat = {key: value.view(-1) for key, value in values.items()}
        return Slice(names, shape, start, flat, self._is_copy)
