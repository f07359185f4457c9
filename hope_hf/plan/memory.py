"""Peak memory of one process, by arithmetic: states, gathered blocks and activations at four moments of a step."""

from dataclasses import dataclass

from hope_hf.step.recompute import parse_recomputed

from .activations import Activations, activations
from .shapes import Shapes
from .states import level_periods, optimizer_bytes, shard_bytes
from .strategy import GRADIENTS, OPTIMIZER, WEIGHTS, Launch


@dataclass(frozen=True)
class Memory:
    """Bytes of the process with the largest part.

    Attributes:
        split: at the peak, by category.
        states: of weights, gradients and optimizer (and of buckets, which an engine keeps), at any moment and place.
        moment: of the peak: "loss", "blocks" (the backward pass enters them), "backward" (its end) or "update".
        host: bytes in the memory of a machine, of all its processes.
        gathered_block: bytes of the largest block once gathered; 0 where nothing is gathered.
        between_batches: bytes of whole gradients held between accumulated batches.
    """

    split: dict[str, int]
    states: dict[str, int]
    moment: str
    host: int
    gathered_block: int
    between_batches: int
    is_estimate: bool

    @property
    def peak(self) -> int:
        return sum(self.split.values())


def memory(config, shapes: Shapes, launch: Launch, step, per_node: int = 8) -> Memory:
    """The peak of one optimizer step.

    Args:
        step: `StepOptions`.
        per_node: processes of one machine.
    """
    recomputed = parse_recomputed(step.checkpointing)
    kept = activations(config, shapes, launch, step.batch_size, step.block_size, recomputed)
    tokens = step.batch_size * step.block_size * step.accumulation * launch.world_size
    states = _states(config, shapes, launch, step, tokens)
    compute = launch.compute_bytes
    block = shapes.largest_block * compute if launch.strategy.gathers else 0
    between = _between_batches(shapes, launch, step) if step.accumulation > 1 else 0
    # Gradients as a process holds them while it works on a batch: of the batches before, and of this one.
    before = states["gradients"] if step.accumulation > 1 and not between else 0
    after = 0 if between else states["gradients"]
    moments = {
        "loss": _at_loss(shapes, launch, states, kept, compute),
        "blocks": _in_blocks(shapes, launch, states, kept, compute),
        "backward": _in_backward(shapes, launch, states, kept, compute),
        "update": dict(states),
    }
    for name, gradients in (("loss", before), ("blocks", before), ("backward", after)):
        moments[name] |= {"gradients": gradients}
        moments[name]["whole gradients"] = moments[name].get("whole gradients", 0) + between
    offloads = launch.strategy.offloads
    # DeepSpeed's copy of the weights belongs to its optimizer.
    offloads |= {"buckets"} if OPTIMIZER in offloads else set()
    host = sum(size for name, size in states.items() if name in offloads)
    for split in moments.values():
        for name in offloads:
            split.pop(name, None)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return Memory(
        {name: size for name, size in moments[moment].items() if size},
        states,
        moment,
        host * min(per_node, launch.world_size),
        block,
        between,
        kept.is_estimate,
    )


def _states(config, shapes: Shapes, launch: Launch, step, tokens: int) -> dict[str, int]:
    """Weights, gradients and optimizer of the largest part, and what an engine keeps beside them."""
    shared, by_rows = launch.strategy.shared, launch.strategy.engine == "fsdp2"
    periods = level_periods(config)

    def part(kind: str, each=lambda weight: 4) -> int:
        return shard_bytes(shapes, launch.parts if kind in shared else 1, by_rows, each)

    # DeepSpeed's own fp16: the model's weights and gradients in fp16 beside the optimizer's fp32 weights.
    halves = launch.strategy.engine == "deepspeed" and launch.precision == "fp16"
    states = {
        "weights": part(WEIGHTS, lambda weight: 2 if halves else 4),
        "gradients": part(GRADIENTS, lambda weight: 2 if halves else 4),
        "optimizer": part(OPTIMIZER, lambda weight: optimizer_bytes(weight, step.optimizer, periods, tokens)),
    }
    if launch.strategy.engine == "plain" and launch.world_size > 1:
        # DDP reduces gradients in buckets, which are not the gradients themselves.
        states["buckets"] = 4 * shapes.count
    if launch.strategy.engine == "deepspeed":
        # DeepSpeed's optimizer has its own copy of the weights that it updates.
        states["buckets"] = shard_bytes(shapes, launch.parts, False)
    return states


def _between_batches(shapes: Shapes, launch: Launch, step) -> int:
    """Without `--sync_each_batch` FSDP adds up the gradients of the whole model, instead of a process's part."""
    if not launch.strategy.engine.startswith("fsdp") or not launch.strategy.gathers or step.sync_each_batch:
        return 0
    if launch.precision == "no":
        return 4 * shapes.count
    # Version 1 adds them up as they were computed, version 2 as they will be summed over processes.
    size = launch.compute_bytes if launch.strategy.engine == "fsdp1" else step.reduce_dtype.itemsize
    return size * shapes.count


def _at_loss(shapes: Shapes, launch: Launch, states: dict, kept: Activations, compute: int) -> dict[str, int]:
    gathered = 0
    if launch.strategy.gathers:
        units = shapes.units
        gathered = shapes.count if launch.strategy.keeps_gathered else units.get("tail", 0) + units.get("root", 0)
    return {
        **states,
        "gathered": gathered * compute,
        "weight copies": kept.weight_copies,
        "activations": kept.blocks + kept.loss,
    }


def _in_blocks(shapes, launch: Launch, states: dict, kept: Activations, compute: int) -> dict[str, int]:
    """Early in the backward pass: most activations, a few new gradients."""
    early = {"weight copies": kept.weight_copies, "activations": kept.in_backward}
    return _in_backward(shapes, launch, states, kept, compute) | early


def _in_backward(shapes, launch: Launch, states: dict, kept: Activations, compute: int) -> dict[str, int]:
    """At the last of the blocks: all gradients, one block's activations, and gradients of a quarter of them."""
    moment = {**states, "activations": kept.one_block, "backward": kept.one_block // 4}
    block = shapes.largest_block
    if launch.strategy.gathers:
        # The block and the one gathered ahead of it; the block's own gradients, in fp32 while they are reduced.
        moment["gathered"] = 2 * block * compute
        moment["whole gradients"] = block * 4
    return moment

