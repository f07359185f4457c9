"""What fills the memory, while it fills and when it is full."""

import json
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from .placement import GIB, free_memory, size_in_bytes
from .telemetry import peak_memory_gib


class MemoryReport:
    """Appends lines to `memory_rank<N>.jsonl`: at the start, after the first step, every so often, and out of memory.

    Rows are GiB of this process: parameters, gradients and optimizer state as it holds them, the largest total so
    far, and what is left of the device. On a GPU also what torch has allocated and reserved, and, when memory runs out, torch's
    own table in `memory_summary_rank<N>.txt`.
    """

    def __init__(self, output_dir: str, rank: int, device: torch.device, every_steps: int):
        """`every_steps` 0: at the start and after the first step alone."""
        self._folder, self._rank, self._device, self._every = Path(output_dir), rank, device, every_steps
        self._folder.mkdir(parents=True, exist_ok=True)

    def step(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer):
        """A step has ended (0: none yet); its gradients are there still."""
        if step < 2 or (self._every and step % self._every == 0):
            self._write("start" if step == 0 else "step", step, model, optimizer)

    @contextmanager
    def out_of_memory(self, model: nn.Module, optimizer: torch.optim.Optimizer):
        """Around the training: leaves the figures of the moment at which memory ran out."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self._device.type == "cuda":
                summary = torch.cuda.memory_summary(self._device)
                (self._folder / f"memory_summary_rank{self._rank}.txt").write_text(summary, encoding="utf-8")
            self._write("out of memory", None, model, optimizer)
            raise

    def _write(self, event: str, step: int | None, model: nn.Module, optimizer: torch.optim.Optimizer):
        parameters = list(model.parameters())
        free = free_memory(self._device)
        row = {
            "event": event,
            "step": step,
            "parameters_gib": size_in_bytes(parameters) / GIB,
            "gradients_gib": size_in_bytes(p.grad for p in parameters if p.grad is not None) / GIB,
            "optimizer_gib": size_in_bytes(_tensors(optimizer)) / GIB,
            "peak_gib": peak_memory_gib(self._device),
            "free_gib": None if free is None else free / GIB,
        }
        if self._device.type == "cuda":
            row["allocated_gib"] = torch.cuda.memory_allocated(self._device) / GIB
            row["reserved_gib"] = torch.cuda.memory_reserved(self._device) / GIB
        with (self._folder / f"memory_rank{self._rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _tensors(optimizer: torch.optim.Optimizer):
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
