"""The peak memory of one training step, simulated whole on fake tensors and a fake process group.

One CPU process simulates any number of processes: model, wrapping and optimizer are the trainer's own, and torch's
trackers (`torch.distributed._tools`) count the bytes of all live tensors. That takes a minute for a deep model;
`memory.py` adds up the traces of a few parts to the same peak, as `tests/plan/test_memory.py` shows.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from hope_hf.common.objective import can_skip_logits, summed_loss
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.optim import LevelClock, build_optimizer

from .as_if_real import as_if_real
from .fake import build, in_precision, operators_of, runs_on_kernels, without_dropout
from .launch import Launch, StepOptions

# accelerate's names for the axes of a mesh.
MESH = ("dp_replicate", "dp_shard_cp")
# torch's categories of tensors -> the planner's.
CATEGORIES = {
    "Parameter": "weights", "Sharded Param": "weights", "Gradient": "gradients", "Sharded Grad": "gradients",
    "Optstate": "optimizer", "OptState": "optimizer", "Unsharded Param": "gathered", "All Gather": "gathered",
    "Unsharded Grad": "whole gradients", "Reduce Scatter": "whole gradients", "Activation": "activations",
    "Temp": "backward", "Buffer": "other", "Inputs": "other", "Other": "other",
}  # fmt: skip

Sizes = Counter[str]
"""Bytes by category."""


@dataclass(frozen=True)
class Simulation:
    """Peak bytes of all live tensors on the rank with the largest part, by category.

    `seconds`: what the simulation took.
    """

    peak: int
    split: Sizes
    seconds: float


def can_simulate(config, launch: Launch) -> str | None:
    """None, or the reason why a step of this model under this launch cannot be simulated."""
    if any(runs_on_kernels(mixer, config, launch) for mixer in getattr(config, "mixers", ())):
        return "kernels of flash-linear-attention are not simulated"
    if launch.strategy.engine not in ("plain", "fsdp2"):
        return f"{launch.strategy.engine} is not simulated"
    return "offloading is not simulated" if launch.strategy.offloads else None


def simulate(config, launch: Launch, options: StepOptions) -> Simulation:
    """The step of `hope_hf.training`, which runs once."""
    start = time.perf_counter()
    config = without_dropout(config)
    with ExitStack() as stack:
        # Parts of torch warn because they expect real tensors.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if launch.world_size > 1:
            # Only the first of the ranks exists; collectives do nothing.
            dist.init_process_group("fake", rank=0, world_size=launch.world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        # Before the fake mode, because a mesh reads its own numbers.
        mesh = make_mesh(launch)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake:
            step = Step(config, launch, options, mesh)
            if len(step.batches) > 1:
                # Batches before the last leave gradients behind, whatever their size.
                step.batches[0] = torch.zeros((1, min(16, options.block_size)), dtype=torch.long)
        in_place = not launch.strategy.gathers
        stack.enter_context(as_if_real(fake, step.model, options.block_size, in_place))
        step.warm_up()
        tracker = step.tracker()
        watch = _Watch(tracker)
        with tracker:
            step.connect()
            # The tracker's statistics by module, unused here, allow one forward pass each.
            step.run(between=tracker.reset_mod_stats)
    peak = watch.peak()
    if isinstance(step.wrapped, DistributedDataParallel):
        # The tracker counts DDP's buckets, as large as the gradients, as activations.
        buckets = sum(parameter.nbytes for parameter in step.model.parameters())
        peak["buckets"] = buckets
        peak["activations"] -= buckets
    split = {category: size for category, size in peak.items() if size}
    return Simulation(peak.total(), split, seconds=time.perf_counter() - start)


class _Watch:
    """Records the largest snapshot of a tracker."""

    def __init__(self, tracker: MemTracker):
        self.tracker = tracker
        self.largest = {"Total": -1}
        # In place of statistics by module, which the tracker reads after every operator.
        tracker._update_peak_stats = self.record

    def record(self, state) -> None:
        """Called by the tracker after every operator."""
        for device, snapshot in self.tracker._curr_mem_snap.items():
            if device.type == "cpu" and snapshot["Total"] > self.largest["Total"]:
                self.largest = dict(snapshot)

    def peak(self) -> Sizes:
        """The largest snapshot by category."""
        sizes = Counter()
        for kind, size in self.largest.items():
            if kind != "Total":
                sizes[CATEGORIES[kind.value]] += size
        return sizes


class Step:
    """Model, optimizer and batches of one optimizer step, wrapped as accelerate wraps them; fake or real tensors."""

    def __init__(self, config, launch: Launch, options: StepOptions, mesh: DeviceMesh | None = None):
        self.launch = launch
        self.options = options
        self.mesh = mesh
        with operators_of(launch.on_cpu):
            self.model = build(config, options)
        recompute_activations(self.model, parse_recomputed(options.checkpointing))
        self.wrapped = self._wrap(self.model)
        self.optimizer: LevelClock = build_optimizer(
            self.model, options.optimizer, learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8,
            tokens_per_step=options.tokens(launch.world_size),
        )  # fmt: skip
        self.optimizer.create_states()
        shape = (options.batch_size, options.block_size)
        # Memory use repeats from the second batch on.
        count = min(options.accumulation, 2)
        self.batches = [torch.zeros(shape, dtype=torch.long) for _ in range(count)]
        self.wrapped.train()

    def _wrap(self, model: nn.Module) -> nn.Module:
        if self.launch.precision in LOW_PRECISION:
            model.forward = in_precision(model.forward, self.launch.precision)
        return self._shard(model) if self.launch.strategy.gathers else model

    def connect(self):
        """Wrap a replica in DDP. This comes last, because DDP creates its buckets here."""
        if self.launch.world_size > 1 and not self.launch.strategy.gathers:
            # DDP cannot compare fake weights over processes.
            self.wrapped = DistributedDataParallel(self.model, init_sync=False)
            self.wrapped.train()
            if isinstance(self.batches[0], FakeTensor):
                self.wrapped.register_comm_hook(None, _reduced)

    def _shard(self, model: nn.Module) -> nn.Module:
        launch = self.launch
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=not launch.strategy.keeps_gathered,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
        )
        if launch.precision in LOW_PRECISION:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(
                param_dtype=LOW_PRECISION[launch.precision], reduce_dtype=self.options.reduce_dtype
            )
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh={MESH: self.mesh},
            parallelism_config=SimpleNamespace(fsdp_dim_names=MESH),
            mixed_precision=launch.precision,
            is_main_process=True,
            device=torch.device("cpu"),
        )
        return fsdp2_prepare_model(accelerator, model)

    def tracker(self) -> MemTracker:
        """torch's counter of live tensors; it counts those that exist before the step, too."""
        if isinstance(self.wrapped, FSDPModule):
            tracker = FSDPMemTracker(self.wrapped, self.optimizer)
            tracker.track_inputs(tuple(self.batches))
        else:
            tracker = MemTracker()
            tracker.track_external(self.model, self.optimizer, *self.batches)
        return tracker

    def run(self, between: Callable[[], None] = lambda: None):
        """One optimizer step, as in the trainer; `between` is called between its batches."""
        *earlier, last = self.batches
        for batch in earlier:
            with self._accumulating():
                self._backward(batch)
            between()
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(True)
        self._backward(last)
        self._update()

    def _backward(self, batch: Tensor):
        loss = summed_loss(self.wrapped, {"input_ids": batch}, batch, can_skip_logits(self.model))
        (loss * 1e-3).backward()

    def warm_up(self):
        """Update once with zero gradients, so that DTensor has planned its operations.

        DTensor plans them on whole fake tensors, which the tracker would count.
        """
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self._update()

    def _update(self):
        gradients = []
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                # The rank's own part: with torch 2.11 DTensor plans the norms anew at every call.
                gradients.append(getattr(parameter.grad, "_local_tensor", parameter.grad))
        scale = 1.0 / nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, scale.clamp(max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _accumulating(self) -> AbstractContextManager:
        """The context of a batch before the last one, whose gradients are not reduced."""
        if isinstance(self.wrapped, DistributedDataParallel):
            return self.wrapped.no_sync()
        if isinstance(self.wrapped, FSDPModule):
            self.wrapped.set_requires_gradient_sync(self.options.sync_each_batch)
        return nullcontext()


def make_mesh(launch: Launch) -> DeviceMesh | None:
    """The mesh of a sharded launch: replicas, and the parts of a replica; None for other launches."""
    if not launch.strategy.gathers:
        return None
    sizes = (launch.replicas, launch.parts) if launch.replicas > 1 else (launch.parts,)
    return init_device_mesh("cpu", sizes, mesh_dim_names=MESH[-len(sizes) :])


def _reduced(state, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's all-reduce, which takes no memory: it is in place."""
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future
