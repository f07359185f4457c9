"""Reports what uses the memory, during training and when memory runs out."""

import json
from pathlib import Path

import torch

from hope_hf.cli.process import memory_is_full
from hope_hf.step.gpus import GIB

from ..engines.base import Engine
from ..engines.placement import free_memory, size_in_bytes
from .telemetry import peak_memory_gib


class RamReport:
    """Appends lines to `ram_rank<N>.jsonl`: at the start, after the first step, every so often, and out of memory.

    A step whose batches accumulate has another line, before the last of them. Rows are GiB of this process: weights,
    gradients (after a step those before its update) and optimizer state as it holds them, the largest total so far,
    and what is left of the device. On a GPU also what torch has allocated and reserved, and, when memory runs out,
    torch's own table in `ram_summary_rank<N>.txt`. A context manager around the training.
    """

    def __init__(
        self,
        output_dir: str,
        rank: int,
        device: torch.device,
        every_steps: int,
        engine: Engine,
    ):
        """`every_steps` 0: at the start and after the first step alone."""
        self._folder, self._rank, self._device, self._every = Path(output_dir), rank, device, every_steps
        self._engine = engine
        self._gradients: int | None = None
        self._folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self):
        self._write("start", 0)
        return self

    def __exit__(self, kind, error, traceback):
        if error is not None and memory_is_full(error):
            if self._device.type == "cuda":
                summary = torch.cuda.memory_summary(self._device)
                (self._folder / f"ram_summary_rank{self._rank}.txt").write_text(summary, encoding="utf-8")
            self._write("out of memory", None)

    def last_batch_begins(self, step: int):
        """The last of the accumulated batches of `step` begins, with the gradients of those before."""
        if self._due(step):
            self._write("last batch", step)

    def backward_ends(self, step: int):
        """The gradients of `step` are there; the update will free them."""
        if self._due(step):
            self._gradients = size_in_bytes(self._engine.held_gradients())

    def step_ends(self, step: int):
        """The update of `step` is done."""
        if self._due(step):
            self._write("step", step)
            self._gradients = None

    def _due(self, step: int) -> bool:
        return step == 1 or (self._every > 0 and step % self._every == 0)

    def _write(self, event: str, step: int | None):
        states = (value for state in self._engine.optimizer.state.values() for value in state.values())
        gradients = size_in_bytes(self._engine.held_gradients()) if self._gradients is None else self._gradients
        free = free_memory(self._device)
        row = {
            "event": event,
            "step": step,
            "parameters_gib": size_in_bytes(self._engine.held_weights()) / GIB,
            "gradients_gib": gradients / GIB,
            "optimizer_gib": size_in_bytes(state for state in states if isinstance(state, torch.Tensor)) / GIB,
            "peak_gib": peak_memory_gib(self._device),
            "free_gib": None if free is None else free / GIB,
        }
        if self._device.type == "cuda":
            row["allocated_gib"] = torch.cuda.memory_allocated(self._device) / GIB
            row["reserved_gib"] = torch.cuda.memory_reserved(self._device) / GIB
        with (self._folder / f"ram_rank{self._rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
