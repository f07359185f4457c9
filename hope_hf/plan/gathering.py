"""The moments of a step under an engine that gathers weights unit by unit, as FSDP version 2 does.

Each unit (`shapes.py`) is gathered into one buffer, from which its parameters are copied. The buffer lives until the
next unit is gathered; in the backward pass the next unit's buffer is there while a unit computes. When a unit has its
gradients, its parameters are freed, and the gradients are copied to a buffer that is reduced; it lives until the next
unit is reduced. Version 1 and DeepSpeed's stage 3 hold about as much, in other buffers.
"""

from collections import Counter
from dataclasses import dataclass

from transformers.utils.import_utils import is_torch_greater_or_equal

from .launch import GRADIENTS, Launch, StepOptions
from .moments import BACKWARD, BLOCKS, FORWARD, LOSS, Moment
from .parts import Parts
from .shapes import EMBEDDING, ROOT, TAIL, Shapes, Weight, shard_bytes

# Until torch 2.14 only fp32 gradients are added up by autograd, others by FSDP beside those of the batch.
_AUTOGRAD_ADDS_ALL = is_torch_greater_or_equal("2.15")


@dataclass(frozen=True)
class Unit:
    """Bytes of the parameters that are gathered at once.

    Attributes:
        cast: a process's own part in the dtype that is gathered, if it is not the stored one.
        gathered: all of them.
        reduced: the buffer of their gradients.
        gradient: a process's own part of their gradients.
        narrow: the same in the dtype of the sum, if replicas add it up and it is not fp32.
    """

    cast: int
    gathered: int
    reduced: int
    gradient: int
    narrow: int


def units_of(shapes: Shapes, launch: Launch, step: StepOptions) -> dict[int | str, Unit]:
    """The units, by number of the block or by name."""
    members: dict[int | str, list[Weight]] = {}
    for weight in shapes.weights:
        members.setdefault(weight.unit, []).append(weight)
    units = {}
    for name, weights in members.items():
        units[name] = _unit(weights, launch, step)
    return units


def _unit(weights: list[Weight], launch: Launch, step: StepOptions) -> Unit:
    """The unit of some parameters."""
    strategy = launch.strategy
    is_mixed = launch.precision != "no"
    by_rows = strategy.engine == "fsdp2"
    # Bytes of a gradient that is reduced.
    width = step.reduce_dtype.itemsize if is_mixed and strategy.is_fsdp else 4
    is_narrow = launch.replicas > 1 and width < 4
    # Numbers that the largest part has.
    count = shard_bytes(weights, launch.parts, by_rows, each=lambda weight: 1)
    trained = shard_bytes(weights, launch.parts, by_rows, each=lambda weight: weight.is_trained)
    part = launch.compute_bytes * count
    return Unit(
        cast=part if is_mixed else 0,
        gathered=part * launch.parts,
        reduced=width * trained * launch.parts,
        gradient=4 * trained,
        narrow=width * trained if is_narrow else 0,
    )


class _Walk:
    """The engine's buffers while a step goes through the units; moments are appended as it goes.

    Attributes:
        phase: the name of the moments that are appended.
        stays: bytes of units whose parameters stay gathered.
        gathering: of the buffer from which parameters were or will be copied.
        reducing: of the buffer that is being reduced.
        waiting: of whole gradients of the batches before this one.
        shards: of this process's own gradients.
    """

    def __init__(self, units: dict[int | str, Unit], launch: Launch, step: StepOptions):
        self.units = units
        self.keeps = launch.strategy.keeps_gathered
        self.phase = FORWARD
        self.moments: list[Moment] = []
        self.stays = 0
        self.gathering = 0
        self.reducing = 0
        self.waiting = 0
        self.shards = 0
        is_repeated = step.accumulation > 1
        self.has_shards = is_repeated and step.sync_each_batch
        self.has_whole = is_repeated and not step.sync_each_batch
        # autograd adds to the gradients of the batches before
        self.adds_in_place = self.has_whole and (_AUTOGRAD_ADDS_ALL or launch.precision == "no")
        if self.has_whole:
            self.waiting = sum(unit.reduced for unit in units.values())
        if self.has_shards:
            self.shards = sum(unit.gradient for unit in units.values())

    def add(self, activations: int, gathered: int = 0, gradients: int = 0) -> None:
        """A moment; `gathered` and whole `gradients` of the unit that runs."""
        if self.adds_in_place:
            gradients = 0
        sizes = Counter[str]()
        sizes["activations"] = activations
        sizes["gathered"] = self.stays + self.gathering + gathered
        sizes["whole gradients"] = self.waiting + self.reducing + gradients
        sizes[GRADIENTS] = self.shards
        self.moments.append(Moment(self.phase, sizes))

    def stay(self, key: int | str) -> None:
        """A unit's parameters stay gathered."""
        self.stays += self.units[key].gathered

    def free(self, key: int | str) -> None:
        """A unit's parameters that stayed are freed."""
        self.stays -= self.units[key].gathered

    def gather(self, key: int | str, activations: int) -> None:
        """Gather a unit in the forward pass; the buffer of the unit before is freed once the parameters are copied."""
        if key not in self.units:
            return
        unit = self.units[key]
        self.add(activations, unit.cast + unit.gathered)
        self.add(activations, 2 * unit.gathered)
        self.gathering = unit.gathered

    def prefetch(self, key: int | str, activations: int, gathered: int = 0, gradients: int = 0) -> None:
        """Gather the next unit of the backward pass, while `gathered` bytes of the one that runs are there."""
        self.gathering = 0
        if key not in self.units or (self.keeps and key != TAIL):
            return
        unit = self.units[key]
        gathered += unit.cast + unit.gathered
        self.add(activations, gathered, gradients)
        self.gathering = unit.gathered

    def reduce(self, key: int | str, activations: int, gradients: int) -> None:
        """Reduce a unit's whole gradients."""
        if key not in self.units:
            return
        unit = self.units[key]
        self.reducing = unit.reduced
        if self.has_whole:
            # They were added to those of the batches before.
            gradients = 0
        self.add(activations, gradients=gradients)
        if self.has_whole:
            self.waiting -= unit.reduced
        if not self.has_shards:
            self.shards += unit.gradient
        self.shards += unit.narrow
        summed = unit.gradient if self.has_shards else 0
        self.add(activations, gradients=summed)


def gathered_moments(parts: Parts, shapes: Shapes, launch: Launch, step: StepOptions) -> list[Moment]:
    """The moments of forward and backward pass, without weights and optimizer."""
    units = units_of(shapes, launch, step)
    walk = _Walk(units, launch, step)
    left = _forward(walk, parts, shapes.is_tied)
    walk.phase = LOSS
    _loss(walk, parts, left, shapes.is_tied)
    _backward(walk, parts, shapes.is_tied)
    return walk.moments


def _forward(walk: _Walk, parts: Parts, is_tied: bool) -> int:
    """The forward pass to the last block; returns what the blocks leave inside of it."""
    units = walk.units
    inside = parts.ends.inside
    # The first units stay: those parameters that no other unit has, and a tied embedding with the last norm.
    first = (ROOT, TAIL) if is_tied else (ROOT,)
    for key in first:
        walk.gather(key, 0)
        if key in units:
            walk.stay(key)
    if not is_tied:
        walk.gather(EMBEDDING, 0)
        walk.add(inside, units[EMBEDDING].gathered)
        if walk.keeps:
            walk.stay(EMBEDDING)
    left = 0
    for number, block in enumerate(parts.blocks):
        before = inside + left
        walk.gather(number, before)
        walk.add(before + block.forward, units[number].gathered)
        left += block.inside
        if walk.keeps:
            walk.stay(number)
    return left


def _loss(walk: _Walk, parts: Parts, left: int, is_tied: bool) -> None:
    """The forward pass of the ends, the loss, and the backward pass down to the last block."""
    ends = parts.ends
    if not is_tied:
        walk.gather(TAIL, ends.inside + left)
        walk.stay(TAIL)
    walk.add(left + parts.shared + ends.forward)
    kept = parts.kept + parts.shared
    walk.gathering = 0
    walk.add(kept + ends.outside)
    # The tail is freed before the head runs backward, and gathered again: after that, where the head's output leaves
    # the model, since the loss then begins the backward pass.
    walk.free(TAIL)
    of_head = max(ends.head, ends.end)
    walk.gather(TAIL, kept + of_head)
    walk.stay(TAIL)
    peaks = ends.loss_steps
    reduced = 0
    there = kept + ends.head
    if not is_tied:
        # The head's gradient is reduced before the last norm runs backward, for which the tail is gathered once more.
        walk.gathering = 0
        (peak, _), *peaks = peaks
        walk.add(kept + peak)
        walk.free(TAIL)
        _, reduced, *_ = ends.loss_gradients
        there = kept + ends.end
        walk.reduce(TAIL, there, reduced)
        walk.gather(TAIL, there)
        walk.stay(TAIL)
    walk.prefetch(len(parts.blocks) - 1, there)
    for peak, size in peaks:
        walk.add(kept + peak, gradients=size - reduced)
    walk.free(TAIL)
    walk.reducing = 0


def _backward(walk: _Walk, parts: Parts, is_tied: bool) -> None:
    """The backward pass from the last block."""
    ends = parts.ends
    lowest = TAIL if is_tied else EMBEDDING
    # Gradients of the last norm, which wait for those of a tied embedding.
    of_tail = ends.loss_gradients[-1] if is_tied else 0
    of_ends = ends.kept + ends.carried
    below = of_ends + parts.kept + parts.shared
    for number, block in parts.backward:
        walk.phase = BLOCKS if number else BACKWARD
        gathered = 0 if walk.keeps else walk.units[number].gathered
        following = number - 1 if number else lowest
        walk.add(below, gathered, of_tail)
        walk.prefetch(following, below, gathered, of_tail)
        below -= block.kept
        for peak, size in block.steps:
            walk.add(below + peak, gathered, of_tail + size)
        if walk.keeps:
            walk.free(number)
        walk.reducing = 0
        whole = of_tail + block.gradients[-1]
        walk.reduce(number, below + block.end, whole)
    keeps_lowest = walk.keeps and not is_tied
    gathered = 0 if keeps_lowest else walk.units[lowest].gathered
    walk.add(of_ends, gathered, of_tail)
    walk.gathering = 0
    gradients = 0
    for peak, size in ends.last_steps:
        gradients = of_tail + size
        walk.add(peak, gathered, gradients)
    walk.stays = 0
    for key in (ROOT, lowest):
        walk.reducing = 0
        walk.reduce(key, 0, gradients)
