"""The moments of a step under an engine that gathers weights unit by unit, as FSDP version 2 does.

Each unit (`shapes.py`) is gathered into one buffer, from which its parameters are copied. The buffer lives until the
next unit is gathered; in the backward pass the next unit's buffer is there while a unit computes. When a unit has its
gradients, its parameters are freed, and the gradients are copied to a buffer that is reduced; it lives until the next
unit is reduced. Version 1 and DeepSpeed's stage 3 hold about as much, in other buffers.
"""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from .launch import GRADIENTS, Launch, StepOptions
from .moments import BACKWARD, BLOCKS, FORWARD, LOSS, Moment
from .parts import Parts
from .shapes import EMBEDDING, ROOT, TAIL, Shapes, Weight, shard_bytes


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
    weights: dict[int | str, list[Weight]] = {}
    for weight in shapes.weights:
        weights.setdefault(weight.unit, []).append(weight)
    part = partial(shard_bytes, parts=launch.parts, by_rows=launch.strategy.engine == "fsdp2")
    is_mixed = launch.precision != "no"
    reduced = step.reduce_dtype.itemsize if is_mixed and launch.strategy.is_fsdp else 4
    units = {}
    for name, members in weights.items():
        own = part(members, each=lambda weight: 1)
        trained = part(members, each=lambda weight: weight.is_trained)
        units[name] = Unit(
            cast=launch.compute_bytes * own if is_mixed else 0,
            gathered=launch.compute_bytes * own * launch.parts,
            reduced=reduced * trained * launch.parts,
            gradient=4 * trained,
            narrow=reduced * trained if launch.replicas > 1 and reduced < 4 else 0,
        )
    return units


class _Step:
    """The engine's buffers while a step goes through the units; moments are appended as it goes.

    Attributes:
        stays: bytes of units whose parameters stay gathered.
        gathering: of the buffer from which parameters were or will be copied.
        reducing: of the buffer that is being reduced.
        waiting: of whole gradients of the batches before this one.
        shards: of this process's own gradients.
    """

    def __init__(self, units: dict[int | str, Unit], launch: Launch, step: StepOptions):
        self.units = units
        self.keeps = launch.strategy.keeps_gathered
        self.moments: list[Moment] = []
        self.stays = self.gathering = self.reducing = self.waiting = self.shards = 0
        is_repeated = step.accumulation > 1
        self.has_shards = is_repeated and step.sync_each_batch
        self.has_whole = is_repeated and not step.sync_each_batch
        # In fp32 autograd adds to the gradients of the batches before; others are added up in the dtype of the sum.
        self.adds_in_place = self.has_whole and launch.precision == "no"
        if self.has_whole:
            self.waiting = sum(unit.reduced for unit in units.values())
        if self.has_shards:
            self.shards = sum(unit.gradient for unit in units.values())

    def add(self, name: str, activations: int, gathered: int = 0, gradients: int = 0) -> None:
        """A moment; `gathered` and whole `gradients` of the unit that runs."""
        if self.adds_in_place:
            gradients = 0
        sizes = Counter(
            {
                "activations": activations,
                "gathered": self.stays + self.gathering + gathered,
                "whole gradients": self.waiting + self.reducing + gradients,
                GRADIENTS: self.shards,
            }
        )
        self.moments.append(Moment(name, sizes))

    def gather(self, key, name: str, activations: int) -> None:
        """Gather a unit in the forward pass; the buffer of the unit before is freed once the parameters are copied."""
        if key not in self.units:
            return
        unit = self.units[key]
        self.add(name, activations, unit.cast + unit.gathered)
        self.add(name, activations, 2 * unit.gathered)
        self.gathering = unit.gathered

    def prefetch(self, key, name: str, activations: int, gathered: int = 0, gradients: int = 0) -> None:
        """Gather the next unit of the backward pass, while `gathered` bytes of the one that runs are there."""
        self.gathering = 0
        if key not in self.units or (self.keeps and key != TAIL):
            return
        unit = self.units[key]
        self.add(name, activations, gathered + unit.cast + unit.gathered, gradients)
        self.gathering = unit.gathered

    def reduce(self, key, name: str, activations: int, gradients: int) -> None:
        """Reduce a unit's whole gradients."""
        if key not in self.units:
            return
        unit = self.units[key]
        self.reducing = unit.reduced
        if self.has_whole:
            # They were added to those of the batches before.
            gradients = 0
        self.add(name, activations, gradients=gradients)
        if self.has_whole:
            self.waiting -= unit.reduced
        if not self.has_shards:
            self.shards += unit.gradient
        self.shards += unit.narrow
        self.add(name, activations, gradients=unit.gradient if self.has_shards else 0)


def gathered_moments(parts: Parts, shapes: Shapes, launch: Launch, step: StepOptions) -> list[Moment]:
    """The moments of forward and backward pass, without weights and optimizer."""
    units = units_of(shapes, launch, step)
    walk = _Step(units, launch, step)
    left = _forward(walk, parts, shapes.is_tied)
    _loss(walk, parts, left, shapes.is_tied)
    _backward(walk, parts, shapes.is_tied)
    return walk.moments


def _forward(walk: _Step, parts: Parts, is_tied: bool) -> int:
    """The forward pass to the last block; returns what the blocks leave inside of it."""
    units = walk.units
    ends = parts.ends
    # The first units stay: those parameters that no other unit has, and a tied embedding with the last norm.
    for key in (ROOT, TAIL) if is_tied else (ROOT,):
        walk.gather(key, FORWARD, 0)
        walk.stays += units[key].gathered if key in units else 0
    if not is_tied:
        walk.gather(EMBEDDING, FORWARD, 0)
        walk.add(FORWARD, ends.inside, units[EMBEDDING].gathered)
        walk.stays += units[EMBEDDING].gathered if walk.keeps else 0
    left = 0
    for number, block in enumerate(parts.blocks):
        walk.gather(number, FORWARD, ends.inside + left)
        walk.add(FORWARD, ends.inside + left + block.forward, units[number].gathered)
        left += block.inside
        walk.stays += units[number].gathered if walk.keeps else 0
    return left


def _loss(walk: _Step, parts: Parts, left: int, is_tied: bool) -> None:
    """The forward pass of the ends, the loss, and the backward pass down to the last block."""
    ends = parts.ends
    tail = walk.units[TAIL].gathered
    if not is_tied:
        walk.gather(TAIL, LOSS, ends.inside + left)
        walk.stays += tail
    walk.add(LOSS, left + parts.shared + ends.forward)
    kept = parts.kept + parts.shared
    walk.gathering = 0
    walk.add(LOSS, kept + ends.outside)
    # The tail is freed before the head runs backward, and gathered again: after that, where the head's output leaves
    # the model, since the loss then begins the backward pass.
    walk.stays -= tail
    walk.gather(TAIL, LOSS, kept + max(ends.head, ends.end))
    walk.stays += tail
    peaks = list(zip(ends.loss, ends.loss_gradients, strict=True))
    reduced = 0
    left = ends.head
    if not is_tied:
        # The head's gradient is reduced before the last norm runs backward, for which the tail is gathered once more.
        walk.gathering = 0
        (peak, _), *peaks = peaks
        walk.add(LOSS, kept + peak)
        walk.stays -= tail
        _, reduced, *_ = ends.loss_gradients
        left = ends.end
        walk.reduce(TAIL, LOSS, kept + left, reduced)
        walk.gather(TAIL, LOSS, kept + left)
        walk.stays += tail
    walk.prefetch(len(parts.blocks) - 1, LOSS, kept + left)
    for peak, size in peaks:
        walk.add(LOSS, kept + peak, gradients=size - reduced)
    walk.stays -= tail
    walk.reducing = 0


def _backward(walk: _Step, parts: Parts, is_tied: bool) -> None:
    """The backward pass from the last block."""
    units = walk.units
    ends = parts.ends
    lowest = TAIL if is_tied else EMBEDDING
    # Gradients of the last norm, which wait for those of a tied embedding.
    of_tail = ends.loss_gradients[-1] if is_tied else 0
    below = ends.kept + ends.carried + parts.kept + parts.shared
    for number, block in reversed(list(enumerate(parts.blocks))):
        unit = units[number]
        name = BLOCKS if number else BACKWARD
        gathered = 0 if walk.keeps else unit.gathered
        walk.add(name, below, gathered, of_tail)
        walk.prefetch(number - 1 if number else lowest, name, below, gathered, of_tail)
        below -= block.kept
        for peak, size in zip(block.backward, block.gradients, strict=True):
            walk.add(name, below + peak, gathered, of_tail + size)
        walk.stays -= unit.gathered if walk.keeps else 0
        walk.reducing = 0
        walk.reduce(number, name, below + block.end, of_tail + block.gradients[-1])
    gathered = 0 if walk.keeps and not is_tied else units[lowest].gathered
    walk.add(BACKWARD, ends.kept + ends.carried, gathered, of_tail)
    walk.gathering = 0
    gradients = 0
    for peak, size in zip(ends.last, ends.last_gradients, strict=True):
        gradients = of_tail + size - ends.loss_gradients[-1]
        walk.add(BACKWARD, peak, gathered, gradients)
    walk.stays = 0
    for key in (ROOT, lowest):
        walk.reducing = 0
        walk.reduce(key, BACKWARD, 0, gradients)
