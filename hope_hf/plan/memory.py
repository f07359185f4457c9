"""Peak memory of one process: what the parts of a step allocate, added up with states and the engine's buffers.

The states are weights, gradients and optimizer. Rajbhandari et al. 2020 (arXiv 1910.02054) count 16 bytes per
parameter under Adam: 4 (or 2) each for weights and gradients, 4 for each of two moments. A strategy divides those it
shards.

The forward pass adds what each block leaves to what the blocks before it left; the backward pass takes it away again
and adds gradients. So a step is a row of moments, and its peak that of the largest.
"""

from collections import Counter
from dataclasses import dataclass

from .gathering import gathered_moments
from .launch import GRADIENTS, OPTIMIZER, WEIGHTS, Launch, StepOptions
from .moments import BACKWARD, BLOCKS, FORWARD, LOSS, UPDATE, Moment
from .parts import Parts, parts_of
from .shapes import Shapes, largest_part, shard_bytes


@dataclass(frozen=True)
class Memory:
    """Bytes of the process with the largest part.

    Attributes:
        split: the peak by category.
        states: weights, gradients, optimizer and the engine's buckets; offloaded ones are included.
        moment: when the peak occurs: "forward", "loss", "blocks" (the backward pass is inside the blocks), "backward"
            (its end) or "update".
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


def memory(
    config, shapes: Shapes, launch: Launch, step: StepOptions, per_node: int = 8, parts: Parts | None = None
) -> Memory:
    """The peak memory of one optimizer step, with `per_node` processes on one machine.

    `parts`: of the step's batch; traced if they are not given.
    """
    if parts is None:
        parts = parts_of(config, shapes, launch, step)
    states = _states(shapes, launch, step)
    resting = Counter(states)
    del resting[GRADIENTS]
    if launch.strategy.gathers:
        moments = gathered_moments(parts, shapes, launch, step)
    else:
        trained = shapes.trained / shapes.count
        replica = _Replica(states[GRADIENTS], trained, launch, step)
        replica.take(parts)
        moments = replica.moments
    update = Counter({GRADIENTS: states[GRADIENTS]})
    moments.append(Moment(UPDATE, update))
    offloads = launch.strategy.offloads
    if OPTIMIZER in offloads:
        # DeepSpeed offloads its copy of the weights together with its optimizer.
        offloads |= {"buckets"}
    for moment in moments:
        moment.sizes.update(resting)
        for name in offloads:
            moment.sizes[name] = 0
    peak = max(moments, key=lambda moment: moment.sizes.total())
    host = sum(states[name] for name in offloads)
    gathered_block = shapes.largest_block if launch.strategy.gathers else 0
    return Memory(
        # Without what is 0.
        split=dict(+peak.sizes),
        states=dict(states),
        moment=peak.name,
        host=host * min(per_node, launch.world_size),
        gathered_block=gathered_block * launch.compute_bytes,
        between_batches=_between_batches(shapes, launch, step),
        is_estimate=parts.is_estimate,
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
    by_rows = strategy.engine == "fsdp2"
    states = Counter[str]()
    for name, each in elements.items():
        parts = launch.parts if name in strategy.shared else 1
        states[name] = shard_bytes(shapes.weights, parts, by_rows, each)
    states[WEIGHTS] += shapes.buffers
    trained = 4 * shapes.trained
    if strategy.engine == "plain" and launch.world_size > 1:
        # DDP copies gradients to buckets and reduces these.
        states["buckets"] = trained
    if is_deepspeed:
        # DeepSpeed's optimizer updates its own copy of the weights.
        states["buckets"] = largest_part(trained, launch.parts)
    return states


def _between_batches(shapes: Shapes, launch: Launch, step: StepOptions) -> int:
    """Bytes of the whole gradients that FSDP holds between the batches of a step."""
    dtype = launch.whole_gradients(step.reduce_dtype)
    if dtype is None or step.accumulation == 1 or step.sync_each_batch:
        return 0
    return dtype.itemsize * shapes.trained


class _Replica:
    """The moments of a process that has all weights.

    Attributes:
        gradients: bytes of those that it holds at the end.
        trained: share of the parameters that are trained; the parts have gradients of all.
    """

    def __init__(self, gradients: int, trained: float, launch: Launch, step: StepOptions):
        self.gradients = gradients
        self.trained = trained
        self.moments: list[Moment] = []
        self._has_gradients = step.accumulation > 1
        # Of the gradients of a part that has run backward it may hold a share alone.
        self._shared = launch.parts if GRADIENTS in launch.strategy.shared else 1

    def add(self, name: str, activations: int, before: int = 0, now: int = 0) -> None:
        """A moment; `before` and `now`: whole gradients of the parts that ran backward, and of the one that runs."""
        gradients = self.gradients
        if not self._has_gradients:
            whole = before / self._shared + now
            gradients = round(self.trained * whole)
        sizes = Counter({"activations": activations, GRADIENTS: gradients})
        self.moments.append(Moment(name, sizes))

    def take(self, parts: Parts) -> None:
        """Forward and backward pass."""
        ends = parts.ends
        left = 0
        for block in parts.blocks:
            self.add(FORWARD, ends.inside + left + block.forward)
            left += block.inside
        self.add(LOSS, left + parts.shared + ends.forward)
        kept = parts.kept + parts.shared
        self.add(LOSS, kept + ends.outside)
        for peak, size in ends.loss_steps:
            self.add(LOSS, kept + peak, now=size)
        before = ends.loss_gradients[-1]
        kept += ends.kept + ends.carried
        for number, block in parts.backward:
            kept -= block.kept
            name = BLOCKS if number else BACKWARD
            for peak, size in block.steps:
                self.add(name, kept + peak, before, size)
            before += block.gradients[-1]
        for peak, size in ends.last_steps:
            self.add(BACKWARD, peak, before, size)
