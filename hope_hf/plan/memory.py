"""Peak memory of one process, by arithmetic: states, gathered blocks and activations at four moments of a step.

The states are weights, gradients and optimizer. Rajbhandari et al. 2020 (arXiv 1910.02054) count 16 bytes per
parameter under Adam: 4 (or 2) each for weights and gradients, 4 for each of two moments. A strategy divides those it
shards.
"""

from collections import Counter
from dataclasses import dataclass

from hope_hf.common.recompute_flag import parse_recomputed

from .activations import Activations, activations
from .launch import GRADIENTS, OPTIMIZER, WEIGHTS, Launch, StepOptions
from .shapes import ROOT, TAIL, Shapes


def shard_bytes(shapes: Shapes, parts: int, by_rows: bool, each=lambda weight: 4) -> int:
    """Bytes of the largest part of all parameters; `each`: bytes per element of a parameter."""
    total = 0
    for weight in shapes.weights:
        count = weight.count
        if by_rows:
            rows = weight.shape[0]
            count = count // rows * _largest_part(rows, parts)
        total += count * each(weight)
    return total if by_rows else _largest_part(total, parts)


def _largest_part(whole: int, parts: int) -> int:
    """`whole / parts`, rounded up."""
    return -(-whole // parts)


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
        sizes = moments[moment]
        sizes["whole gradients"] += whole_gradients
        # A process's own part of the gradients: the sum of the batches before this one, and at the end the whole sum.
        if whole_gradients or (moment != "backward" and step.accumulation == 1):
            sizes["gradients"] = 0
    offloads = launch.strategy.offloads
    if OPTIMIZER in offloads:
        # DeepSpeed offloads its copy of the weights together with its optimizer.
        offloads |= {"buckets"}
    host = 0
    for name in offloads:
        host += states[name]
        for sizes in moments.values():
            sizes[name] = 0
    moment = max(moments, key=lambda name: moments[name].total())
    gathered_block = shapes.largest_block if launch.strategy.gathers else 0
    return Memory(
        # Without what is 0.
        split=dict(+moments[moment]),
        states=dict(states),
        moment=moment,
        host=host * min(per_node, launch.world_size),
        gathered_block=gathered_block * launch.compute_bytes,
        between_batches=whole_gradients,
        is_estimate=kept.is_estimate,
    )


def _states(shapes: Shapes, launch: Launch, step: StepOptions) -> Counter[str]:
    """Weights, gradients and optimizer of the largest part, and the engine's own buffers."""
    strategy = launch.strategy
    is_deepspeed = strategy.engine == "deepspeed"
    tokens = step.tokens(launch.world_size)
    # Under DeepSpeed's fp16 the model has fp16 weights and gradients, and the optimizer fp32 weights.
    width = 2 if is_deepspeed and launch.precision == "fp16" else 4
    # Bytes per element of a parameter.
    elements = {
        WEIGHTS: lambda weight: width,
        GRADIENTS: lambda weight: width * weight.is_trained,
        OPTIMIZER: lambda weight: weight.optimizer_bytes(step.optimizer, tokens),
    }
    states = Counter()
    for name, each in elements.items():
        parts = launch.parts if name in strategy.shared else 1
        states[name] = shard_bytes(shapes, parts, by_rows=strategy.engine == "fsdp2", each=each)
    if strategy.engine == "plain" and launch.world_size > 1:
        # DDP copies gradients to buckets and reduces these.
        states["buckets"] = 4 * shapes.trained
    if is_deepspeed:
        # DeepSpeed's optimizer updates its own copy of the weights.
        states["buckets"] = _largest_part(4 * shapes.trained, launch.parts)
    return states


def _between_batches(shapes: Shapes, launch: Launch, step: StepOptions) -> int:
    """Bytes of the whole gradients that FSDP holds between the batches of a step."""
    dtype = launch.whole_gradients(step.reduce_dtype)
    if dtype is None or step.accumulation == 1 or step.sync_each_batch:
        return 0
    return dtype.itemsize * shapes.trained


def _moments(shapes: Shapes, launch: Launch, states: Counter[str], kept: Activations) -> dict[str, Counter[str]]:
    """Bytes by category when the loss is computed, and in the backward pass and update."""
    loss = Counter(states)
    if launch.strategy.gathers:
        gathered = shapes.units[TAIL] + shapes.units[ROOT]
        if launch.strategy.keeps_gathered:
            gathered = shapes.count
        loss["gathered"] = gathered * launch.compute_bytes
    loss["weight copies"] = kept.weight_copies
    loss["activations"] = kept.blocks + kept.loss
    # The end of the backward pass: all gradients, one block's activations, and gradients of a quarter of these.
    backward = Counter(states)
    backward["activations"] = kept.one_block
    backward["backward"] = kept.one_block // 4
    if launch.strategy.gathers:
        # This block and the next one, which is gathered ahead. The block's gradients are fp32 while they are reduced.
        backward["gathered"] = 2 * shapes.largest_block * launch.compute_bytes
        backward["whole gradients"] = 4 * shapes.largest_block
    # Early in the backward pass: most activations, few gradients.
    blocks = Counter(backward)
    blocks["weight copies"] = kept.weight_copies
    blocks["activations"] = kept.in_backward
    return {"loss": loss, "blocks": blocks, "backward": backward, "update": Counter(states)}
