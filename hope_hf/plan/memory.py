"""Peak memory of one process, by arithmetic: states, gathered blocks and activations at four moments of a step.

The states are weights, gradients and optimizer. Rajbhandari et al. 2020 (arXiv 1910.02054) count 16 bytes per
parameter under Adam: 4 (or 2) each for weights and gradients, 4 for each of two moments. A strategy divides those it
shards.
"""

from dataclasses import dataclass

from hope_hf.common.recompute import parse_recomputed

from .activations import Activations, activations
from .launch import GRADIENTS, OPTIMIZER, WEIGHTS, Launch, StepOptions
from .shapes import ROOT, TAIL, Shapes


def shard_bytes(shapes: Shapes, parts: int, by_rows: bool, each=lambda weight: 4) -> int:
    """Bytes of the largest part of all parameters; `each`: bytes per element of a parameter."""
    if by_rows:
        return sum(-(-w.shape[0] // parts) * (w.count // w.shape[0]) * each(w) for w in shapes.weights)
    total = sum(weight.count * each(weight) for weight in shapes.weights)
    return -(-total // parts)


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
    whole_gradients = _between_batches(shapes, launch, step)
    moments = _moments(shapes, launch, states, kept)
    for moment in ("loss", "blocks", "backward"):
        split = moments[moment]
        split["whole gradients"] = split.get("whole gradients", 0) + whole_gradients
        # A process's own part of the gradients: the sum of the batches before this one, and at the end the whole sum.
        if whole_gradients or (moment != "backward" and step.accumulation == 1):
            split["gradients"] = 0
    offloads = launch.strategy.offloads
    # DeepSpeed offloads its copy of the weights together with its optimizer.
    offloads |= {"buckets"} if OPTIMIZER in offloads else set()
    host = 0
    for name in offloads:
        host += states.get(name, 0)
        for split in moments.values():
            split.pop(name, None)
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    return Memory(
        split={name: size for name, size in moments[moment].items() if size},
        states=states,
        moment=moment,
        host=host * min(per_node, launch.world_size),
        gathered_block=shapes.largest_block * launch.compute_bytes if launch.strategy.gathers else 0,
        between_batches=whole_gradients,
        is_estimate=kept.is_estimate,
    )


def _states(shapes: Shapes, launch: Launch, step: StepOptions) -> dict[str, int]:
    """Weights, gradients and optimizer of the largest part, and the engine's own buffers."""
    strategy, engine = launch.strategy, launch.strategy.engine
    tokens = step.tokens(launch.world_size)
    # Under DeepSpeed's fp16 the model has fp16 weights and gradients, and the optimizer fp32 weights.
    width = 2 if engine == "deepspeed" and launch.precision == "fp16" else 4

    def part(kind: str, each) -> int:
        parts = launch.parts if kind in strategy.shared else 1
        return shard_bytes(shapes, parts, by_rows=engine == "fsdp2", each=each)

    states = {
        "weights": part(WEIGHTS, lambda weight: width),
        "gradients": part(GRADIENTS, lambda weight: width * weight.is_trained),
        "optimizer": part(OPTIMIZER, lambda weight: weight.optimizer_bytes(step.optimizer, tokens)),
    }
    if engine == "plain" and launch.world_size > 1:
        # DDP copies gradients to buckets and reduces these.
        states["buckets"] = 4 * shapes.trained
    if engine == "deepspeed":
        # DeepSpeed's optimizer updates its own copy of the weights.
        states["buckets"] = shard_bytes(shapes, launch.parts, False, lambda weight: 4 * weight.is_trained)
    return states


def _between_batches(shapes: Shapes, launch: Launch, step: StepOptions) -> int:
    """Bytes of the whole gradients that FSDP holds between the batches of a step."""
    dtype = launch.whole_gradients(step.reduce_dtype)
    if dtype is None or step.accumulation == 1 or step.sync_each_batch:
        return 0
    return dtype.itemsize * shapes.trained


def _moments(shapes: Shapes, launch: Launch, states: dict[str, int], kept: Activations) -> dict[str, dict[str, int]]:
    """Bytes by category when the loss is computed, and in the backward pass and update."""
    gathers, gathered = launch.strategy.gathers, 0
    if gathers:
        gathered = shapes.count if launch.strategy.keeps_gathered else shapes.units[TAIL] + shapes.units[ROOT]
    loss = states | {
        "gathered": gathered * launch.compute_bytes,
        "weight copies": kept.weight_copies,
        "activations": kept.blocks + kept.loss,
    }
    # The end of the backward pass: all gradients, one block's activations, and gradients of a quarter of these.
    backward = states | {"activations": kept.one_block, "backward": kept.one_block // 4}
    if gathers:
        # This block and the next one, which is gathered ahead. The block's gradients are fp32 while they are reduced.
        backward["gathered"] = 2 * shapes.largest_block * launch.compute_bytes
        backward["whole gradients"] = 4 * shapes.largest_block
    # Early in the backward pass: most activations, few gradients.
    blocks = backward | {"weight copies": kept.weight_copies, "activations": kept.in_backward}
    return {"loss": loss, "blocks": blocks, "backward": backward, "update": dict(states)}
