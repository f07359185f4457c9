"""Peak memory of one process, by arithmetic: states, gathered blocks and activations at four moments of a step.

The states are weights, gradients and optimizer. Rajbhandari et al. 2020 (arXiv 1910.02054) count 16 bytes per
parameter under Adam: 4 (or 2) each for weights and gradients, 4 for each of two moments. A strategy divides those it
shards.
"""

from dataclasses import dataclass

from hope_hf.common.recompute import parse_recomputed
from hope_hf.optim import RULES

from .activations import Activations, activations
from .launch import GRADIENTS, OPTIMIZER, WEIGHTS, Launch, StepOptions, Strategy
from .shapes import Shapes


@dataclass(frozen=True)
class Bytes:
    """Bytes per parameter. Here weights, gradients and moments are fp32 under every mixed precision."""

    weights: float = 4
    gradients: float = 4
    optimizer: float = RULES["adamw"].state_bytes

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def state_bytes(parameters: float, strategy: Strategy, parts: int, each: Bytes = Bytes()) -> float:  # noqa: B008
    """Bytes of weights, gradients and optimizer of one process, if a model is cut evenly into `parts` parts."""
    sizes = {WEIGHTS: each.weights, GRADIENTS: each.gradients, OPTIMIZER: each.optimizer}
    return parameters * sum(size / (parts if kind in strategy.shared else 1) for kind, size in sizes.items())


def shard_bytes(shapes: Shapes, parts: int, by_rows: bool, each=lambda weight: 4) -> int:
    """Bytes of the largest part of all parameters; `each`: bytes per element of a parameter."""
    if by_rows:
        return sum(-(-w.shape[0] // parts) * (w.count // w.shape[0]) * each(w) for w in shapes.weights)
    return -(-sum(w.count * each(w) for w in shapes.weights) // parts)


@dataclass(frozen=True)
class Memory:
    """Bytes of the process with the largest part.

    Attributes:
        split: the peak by category.
        states: weights, gradients, optimizer and the engine's buckets; offloaded ones are included.
        moment: when the peak occurs: "loss", "blocks" (the backward pass enters the blocks), "backward" (its end) or
            "update".
        host: offloaded bytes of all processes of a machine.
        gathered_block: the largest block once gathered; 0 where no block is gathered.
        between_batches: whole gradients held between the batches of a step.
        is_estimate: whether the activations are estimated.
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


def memory(config, shapes: Shapes, launch: Launch, step: StepOptions, per_node: int = 8) -> Memory:
    """The peak memory of one optimizer step, with `per_node` processes on one machine."""
    recomputed = parse_recomputed(step.checkpointing)
    kept = activations(config, shapes, launch, step.batch_size, step.block_size, recomputed)
    states = _states(shapes, launch, step)
    block = shapes.largest_block * launch.compute_bytes if launch.strategy.gathers else 0
    whole = launch.whole_gradients(step.reduce_dtype)
    holds_whole = whole is not None and step.accumulation > 1 and not step.sync_each_batch
    between = whole.itemsize * shapes.trained if holds_whole else 0
    # A process's own part of the gradients: the sum before this batch, and the sum after it.
    before = states["gradients"] if step.accumulation > 1 and not between else 0
    after = 0 if between else states["gradients"]
    moments = {
        "loss": _at_loss(shapes, launch, states, kept),
        "blocks": _in_blocks(shapes, launch, states, kept),
        "backward": _in_backward(shapes, launch, states, kept),
        "update": dict(states),
    }
    for name, gradients in (("loss", before), ("blocks", before), ("backward", after)):
        moments[name] |= {"gradients": gradients}
        moments[name]["whole gradients"] = moments[name].get("whole gradients", 0) + between
    offloads = launch.strategy.offloads
    # DeepSpeed offloads its copy of the weights together with its optimizer.
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


def _states(shapes: Shapes, launch: Launch, step: StepOptions) -> dict[str, int]:
    """Weights, gradients and optimizer of the largest part, and the engine's own buffers."""
    shared, by_rows = launch.strategy.shared, launch.strategy.engine == "fsdp2"
    tokens = step.tokens(launch.world_size)

    def part(kind: str, each) -> int:
        return shard_bytes(shapes, launch.parts if kind in shared else 1, by_rows, each)

    # Under DeepSpeed's fp16 the model has fp16 weights and gradients, and the optimizer fp32 weights.
    halves = launch.strategy.engine == "deepspeed" and launch.precision == "fp16"
    states = {
        "weights": part(WEIGHTS, lambda weight: 2 if halves else 4),
        "gradients": part(GRADIENTS, lambda weight: weight.is_trained * (2 if halves else 4)),
        "optimizer": part(OPTIMIZER, lambda weight: weight.optimizer_bytes(step.optimizer, tokens)),
    }
    if launch.strategy.engine == "plain" and launch.world_size > 1:
        # DDP copies gradients to buckets and reduces these.
        states["buckets"] = 4 * shapes.trained
    if launch.strategy.engine == "deepspeed":
        # DeepSpeed's optimizer updates its own copy of the weights.
        states["buckets"] = shard_bytes(shapes, launch.parts, False, lambda weight: 4 * weight.is_trained)
    return states


def _at_loss(shapes: Shapes, launch: Launch, states: dict, kept: Activations) -> dict[str, int]:
    gathered = 0
    if launch.strategy.gathers:
        units = shapes.units
        gathered = shapes.count if launch.strategy.keeps_gathered else units.get("tail", 0) + units.get("root", 0)
    return {
        **states,
        "gathered": gathered * launch.compute_bytes,
        "weight copies": kept.weight_copies,
        "activations": kept.blocks + kept.loss,
    }


def _in_blocks(shapes: Shapes, launch: Launch, states: dict, kept: Activations) -> dict[str, int]:
    """Early in the backward pass: most activations, few gradients."""
    early = {"weight copies": kept.weight_copies, "activations": kept.in_backward}
    return _in_backward(shapes, launch, states, kept) | early


def _in_backward(shapes: Shapes, launch: Launch, states: dict, kept: Activations) -> dict[str, int]:
    """At the end of the backward pass: all gradients, one block's activations, and gradients of a quarter of these."""
    moment = {**states, "activations": kept.one_block, "backward": kept.one_block // 4}
    if launch.strategy.gathers:
        # This block and the next one, which is gathered ahead. The block's gradients are fp32 while they are reduced.
        moment["gathered"] = 2 * shapes.largest_block * launch.compute_bytes
        moment["whole gradients"] = 4 * shapes.largest_block
    return moment
