"""The peak memory of one training step, simulated on fake tensors and a fake process group.

Fake tensors have shapes but no numbers, so one CPU process simulates any model on any number of processes. torch's
trackers (`torch.distributed._tools`) count the bytes of all live tensors.

Of a deep model three blocks are simulated at most: what one more block of a kind adds to each moment of the step is
measured, and the layers add up. `tests/plan/test_simulate.py` compares the sum with the simulation of all layers.
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
from accelerate.utils import FullyShardedDataParallelPlugin, convert_outputs_to_fp32
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from hope_hf.common.objective import can_skip_logits, summed_loss
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.optim import LevelClock, build_optimizer

from .launch import Launch, StepOptions
from .shapes import blocks_of, shapes_of

# accelerate's names for the axes of a mesh.
MESH = ("dp_replicate", "dp_shard_cp")
# Fields of configurations with the dropout rate of attention weights.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop")
# torch's categories of tensors -> the planner's.
CATEGORIES = {
    "Parameter": "weights", "Sharded Param": "weights", "Gradient": "gradients", "Sharded Grad": "gradients",
    "Optstate": "optimizer", "OptState": "optimizer", "Unsharded Param": "gathered", "All Gather": "gathered",
    "Unsharded Grad": "whole gradients", "Reduce Scatter": "whole gradients", "Activation": "activations",
    "Temp": "backward", "Buffer": "other", "Inputs": "other", "Other": "other",
}  # fmt: skip
# Moments of a step: forward pass and loss, the backward pass of a block, the update.
FORWARD, FIRST, MIDDLE, LAST, UPDATE = "forward", "first block", "middle block", "last block", "update"

Sizes = Counter[str]
"""Bytes by category."""
Peaks = dict[str, Sizes]
"""By moment."""


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
    if any(mixer.expects_kernels(config) for mixer in getattr(config, "mixers", ())):
        return "kernels of flash-linear-attention are not simulated"
    if launch.strategy.engine not in ("plain", "fsdp2"):
        return f"{launch.strategy.engine} is not simulated"
    return "offloading is not simulated" if launch.strategy.offloads else None


def simulate(config, launch: Launch, options: StepOptions, all_layers: bool = False) -> Simulation:
    """The step of `hope_hf.training`, from a few of the model's layers where its blocks repeat.

    `all_layers`: from the whole model, which takes minutes for a deep one.
    """
    start = time.perf_counter()
    kinds = _kinds_of_layers(config)
    if all_layers or not _layers_repeat(config, kinds, launch, options):
        moments = _peaks(config, launch, options)
    else:
        moments = _added_up(config, kinds, launch, options)
    peak = max(moments.values(), key=Counter.total)
    split = {category: size for category, size in peak.items() if size}
    return Simulation(peak.total(), split, seconds=time.perf_counter() - start)


def _kinds_of_layers(config) -> list[str]:
    kinds = getattr(config, "layer_types", None)
    return list(kinds) if kinds else ["block"] * config.num_hidden_layers


def _layers_repeat(config, kinds: list[str], launch: Launch, options: StepOptions) -> bool:
    """Whether layers of a kind are alike, and so many that simulating a few takes less time."""
    different = set(kinds)
    if parse_recomputed(options.checkpointing).every > 1 or len(kinds) <= 2 + 3 * len(different):
        return False
    if launch.strategy.gathers and len(different) > 1:
        # Two neighbours are gathered at once, and each pair of kinds adds other bytes.
        return False
    parameters = shapes_of(config, options.trust_remote_code).units
    sizes = {(kind, parameters[index]) for index, kind in enumerate(kinds)}
    # A model without blocks that FSDP would gather has no parameters in them.
    return parameters[0] > 0 and len(sizes) == len(different)


def _with_layers(config, kinds: list[str]):
    """The config of a model with these layers alone."""
    fields = config.to_dict() | {"num_hidden_layers": len(kinds)}
    if getattr(config, "layer_types", None):
        fields["layer_types"] = kinds
        # the name in HOPE's files
        fields.pop("mixer_types", None)
    return type(config).from_dict(fields)


def _added_up(config, kinds: list[str], launch: Launch, options: StepOptions) -> Peaks:
    """The peaks of a deep model's moments: those of its ends alone, and what each layer between them adds.

    The backward pass frees activations and adds gradients from block to block, so that its peak lies at one of its
    ends. These are the first and last block, which lack a neighbour under FSDP, and those beside them.
    """
    first, *middle, last = kinds
    between = Counter(middle)
    shallow = _peaks(_with_layers(config, [first, last]), launch, options)
    deeper = {}
    for kind in between:
        deeper[kind] = _peaks(_with_layers(config, [first, kind, last]), launch, options)
    peaks = {}
    for moment, sizes in shallow.items():
        peaks[moment] = sizes.copy()
        peaks[moment].update(_growth(shallow, deeper, moment, between))
    for kind in between:
        others = between - Counter([kind])
        for end in (FIRST, LAST):
            sizes = deeper[kind][MIDDLE].copy()
            sizes.update(_growth(shallow, deeper, end, others))
            peaks[f"{kind} beside the {end}"] = sizes
    return peaks


def _growth(shallow: Peaks, deeper: dict[str, Peaks], moment: str, layers: Counter[str]) -> Sizes:
    """What `layers` add to a moment; `deeper`: kind -> peaks with one more layer of that kind than `shallow`."""
    growth = Counter()
    for kind, number in layers.items():
        for category, size in deeper[kind][moment].items():
            growth[category] += number * (size - shallow[moment][category])
    return growth


def _peaks(config, launch: Launch, options: StepOptions) -> Peaks:
    """Run the step once on fake tensors: its peak at each moment."""
    # With dropout the CPU's attention holds heads x tokens^2 numbers; GPU kernels never do.
    no_dropout = {name: 0.0 for name in ATTENTION_DROPOUT if getattr(config, name, 0)}
    config = type(config).from_dict(config.to_dict() | no_dropout)
    with ExitStack() as stack:
        # Parts of torch warn because they expect real tensors.
        stack.enter_context(warnings.catch_warnings(action="ignore"))
        if launch.world_size > 1:
            # Only the first of the ranks exists; collectives do nothing.
            dist.init_process_group("fake", rank=0, world_size=launch.world_size, store=FakeStore())
            stack.callback(dist.destroy_process_group)
        # Before the fake mode, because a mesh reads its own numbers.
        mesh = make_mesh(launch)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        real = stack.enter_context(_AsIfReal())
        step = Step(config, launch, options, mesh)
        if len(step.batches) > 1:
            # Batches before the last leave gradients behind, whatever their size.
            step.batches[0] = torch.zeros((1, min(16, options.block_size)), dtype=torch.long)
        if config.model_type == "hope":
            # Queries are padded to whole blocks.
            real.queries = options.block_size + -options.block_size % config.sparse_block_size
        if not launch.strategy.gathers:
            # Under FSDP both gradients of a tied embedding exist at once.
            real.embedding = step.model.get_input_embeddings().weight.shape
        step.warm_up()
        tracker = step.tracker()
        watch = _Watch(tracker, step)
        with tracker:
            step.connect()
            # The tracker's statistics by module, unused here, allow one forward pass each.
            step.run(between=tracker.reset_mod_stats)
    peaks = watch.peaks()
    if isinstance(step.wrapped, DistributedDataParallel):
        # The tracker counts DDP's buckets, as large as the gradients, as activations.
        buckets = sum(parameter.nbytes for parameter in step.model.parameters())
        for sizes in peaks.values():
            sizes["buckets"] = buckets
            sizes["activations"] -= buckets
    return peaks


class _Watch:
    """Records the largest snapshot of a tracker at each moment of a step."""

    def __init__(self, tracker: MemTracker, step: "Step"):
        self.tracker = tracker
        self.moment = FORWARD
        self.largest: dict[str, dict] = {}
        # In place of statistics by module, which the tracker reads after every operator.
        tracker._update_peak_stats = self.record
        blocks = blocks_of(step.model)
        for block in blocks:
            block.register_forward_hook(self.await_gradient)
        self.moments = dict.fromkeys(blocks, MIDDLE)
        self.moments |= dict.fromkeys(blocks[-1:], LAST)
        self.moments |= dict.fromkeys(blocks[:1], FIRST)
        step.model.register_forward_pre_hook(lambda *call: self.enter(FORWARD))
        step.optimizer.register_step_pre_hook(lambda *call: self.enter(UPDATE))

    def await_gradient(self, block: nn.Module, inputs, output):
        """Enter a block's moment when the gradient of its output is there."""
        hidden_states = output[0] if isinstance(output, tuple) else output
        moment = self.moments[block]
        hidden_states.register_hook(lambda gradient: self.enter(moment))

    def enter(self, moment: str):
        self.moment = moment

    def record(self, state):
        """Called by the tracker after every operator."""
        for device, snapshot in self.tracker._curr_mem_snap.items():
            largest = self.largest.setdefault(self.moment, {"Total": -1})
            if device.type == "cpu" and snapshot["Total"] > largest["Total"]:
                self.largest[self.moment] = dict(snapshot)

    def peaks(self) -> Peaks:
        """The peaks by moment and category."""
        peaks = {}
        for moment, snapshot in self.largest.items():
            sizes = Counter()
            for kind, size in snapshot.items():
                if kind != "Total":
                    sizes[CATEGORIES[kind.value]] += size
            peaks[moment] = sizes
        return peaks


class Step:
    """Model, optimizer and batches of one optimizer step, wrapped as accelerate wraps them; fake or real tensors."""

    def __init__(self, config, launch: Launch, options: StepOptions, mesh: DeviceMesh | None = None):
        self.launch = launch
        self.options = options
        self.mesh = mesh
        flags = {"trust_remote_code": options.trust_remote_code}
        if options.attn_implementation:
            flags["attn_implementation"] = options.attn_implementation
        self.model = AutoModelForCausalLM.from_config(config, **flags)
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
        launch = self.launch
        if launch.precision in LOW_PRECISION:
            # As in `Accelerator.prepare_model`.
            cast = torch.autocast("cpu", dtype=LOW_PRECISION[launch.precision])
            model.forward = convert_outputs_to_fp32(cast(model.forward))
        return self._shard(model) if launch.strategy.gathers else model

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


class _AsIfReal(TorchDispatchMode):
    """Replaces operations that need the numbers of a tensor.

    - A boolean mask selects no elements, so checks of values (such as token ids) find nothing.
    - All `queries` of a row select the first block of sparse attention, as in every text, and no other block.
    - The two gradients of a tied embedding are added in place, as autograd does with real tensors.
    """

    embedding: torch.Size | None = None
    queries: int = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aten = torch.ops.aten
        if function is aten.add.Tensor and self._adds_gradients_of_embedding(*args[:2]):
            function = aten.add_.Tensor
        if function is aten.index.Tensor:
            tensor, indices = args
            mask = _single_mask(indices)
            if mask is not None:
                return tensor.new_empty((0, *tensor.shape[mask.ndim :]))
        if function is aten.bincount.default and self.queries:
            return self._counts_of_blocks(number=args[0].numel(), bins=args[2])
        if function is aten._local_scalar_dense.default:
            if args[0].dtype is torch.bool:
                return False
            return 1.0 if args[0].is_floating_point() else 1
        return function(*args, **(kwargs or {}))

    def _adds_gradients_of_embedding(self, first: Tensor, second) -> bool:
        is_in_backward = torch._C._current_graph_task_id() != -1
        return is_in_backward and isinstance(second, Tensor) and first.shape == second.shape == self.embedding

    def _counts_of_blocks(self, number: int, bins: int) -> Tensor:
        """How many of `number` queries select each block; the last bin counts queries without a block."""
        with unset_fake_temporarily():
            counts = torch.zeros(bins, dtype=torch.long)
            counts[0] = min(self.queries, number)
            counts[-1] = number - counts[0]
            return counts


def _single_mask(indices: list[Tensor | None]) -> Tensor | None:
    """The boolean mask, if it is the only index."""
    tensors = [index for index in indices if index is not None]
    is_mask = len(tensors) == 1 and tensors[0].dtype is torch.bool
    return tensors[0] if is_mask else None
