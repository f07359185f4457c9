"""Gathers the whole weights of a sharded model on the first process, without blocking the training.

Every process copies its own part (`take_parts`, in the training thread). Then a thread of each process gathers the
parts (`TakenParts.together`), directly into their places in the whole tensors. The first process copies its part
straight to its place.
"""

from dataclasses import dataclass

import torch
from accelerate import PartialState
from torch import Tensor, distributed

from ..engines.base import Engine


class HostBuffers:
    """Buffers in CPU memory, by name, that are reused: allocating memory takes longer than filling it."""

    def __init__(self):
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, shape: torch.Size, like: Tensor) -> Tensor:
        """The buffer of this name, with old values; a new one if none has this shape and dtype."""
        kept = self._kept.get(name)
        if kept is None or kept.shape != shape or kept.dtype != like.dtype:
            kept = self._kept[name] = torch.empty(shape, dtype=like.dtype, pin_memory=like.is_cuda)
        return kept

    def copy(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor's values, contiguous."""
        return self.take(name, tensor.shape, tensor).copy_(tensor)

    def clear(self) -> None:
        """Free the memory."""
        self._kept.clear()


@dataclass(frozen=True)
class TakenParts:
    """The weights of one moment, in parts."""

    whole: dict[tuple[str, ...], Tensor]
    """On the first process, by names: the tensors that `together` completes; empty on others."""
    own: list[tuple[int, Tensor]]
    """For each weight, where this process's part begins, and the part; empty if another process sends it."""
    group: distributed.ProcessGroup | None

    def together(self) -> dict[str, Tensor]:
        """All weights by name on the first process, tied ones sharing one tensor; empty on others.

        All processes call it, in any thread; if one of them ends meanwhile, the others fail.
        """
        if self.group is not None:
            self._send() if distributed.get_rank() else self._receive()
        return {name: tensor for names, tensor in self.whole.items() for name in names}

    def _send(self) -> None:
        distributed.gather_object(self._spans(), group=self.group)
        for _, values in self.own:
            if values.numel():
                distributed.send(values.cpu(), 0, self.group)

    def _receive(self) -> None:
        spans: list = [None] * distributed.get_world_size()
        distributed.gather_object(self._spans(), spans, group=self.group)
        for index, tensor in enumerate(self.whole.values()):
            filled = sum(own[index][1] for own in spans)
            assert filled == tensor.numel(), f"{filled} elements of {tensor.numel()} are somebody's"
        for rank, own in enumerate(spans[1:], 1):
            for (start, length), tensor in zip(own, self.whole.values(), strict=True):
                if length:
                    distributed.recv(tensor.view(-1)[start : start + length], rank, self.group)

    def _spans(self) -> list[tuple[int, int]]:
        return [(start, values.numel()) for start, values in self.own]


def take_parts(engine: Engine, buffers: HostBuffers | None = None) -> TakenParts:
    """This process's part of the current weights; all processes call it.

    Args:
        engine: of the training.
        buffers: for copies, if the training changes weights before `together` is done; None if it waits.
    """
    whole, own = {}, []
    for part in engine.weight_slices():
        name, start, values = part.names[0], part.start, part.tensors["weight"]
        if part.is_copy:
            values = torch.empty(0)
        elif not engine.shards_weights or not PartialState().is_main_process:
            values = buffers.copy(name, values) if buffers else values
        if PartialState().is_main_process:
            tensor = values
            if engine.shards_weights:
                tensor = torch.empty(part.shape, dtype=values.dtype)
                if buffers:
                    tensor = buffers.take(name, part.shape, values)
                values = tensor.view(-1)[start : start + len(values)].copy_(values)
            whole[part.names] = tensor.view(part.shape)
        own.append((start, values))
    return TakenParts(whole, own, engine.part_group)
