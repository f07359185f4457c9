"""Files that every process writes: heartbeats, its stacks if it hangs, and its use of memory."""

import faulthandler
import json
import os
import time
from pathlib import Path

import torch

from hope_hf.common.devices import memory_is_full
from hope_hf.common.gpus import GIB

from ..engines.base import Engine
from ..engines.placement import free_memory, size_in_bytes
from .telemetry import peak_memory_gib


class Heartbeat:
    """Appends a line per step to `heartbeat_rank<N>.jsonl`; if none follows in time, writes the stacks of the process.

    After `watchdog_seconds` without a beat the stacks of all threads go to `stacks_rank<N>.txt`, and the process keeps
    waiting. Set it below `--ddp_timeout`, at which a collective ends the run without stacks. A harmless pause, such as
    a long evaluation, only leaves the file.
    """

    def __init__(self, output_dir: str, rank: int, watchdog_seconds: float):
        """0 seconds: no watchdog."""
        # The folder that the first process made does not exist on another machine's own disk.
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        self._lines = (Path(output_dir) / f"heartbeat_rank{rank}.jsonl").open("a", encoding="utf-8")
        self._stacks = Path(output_dir) / f"stacks_rank{rank}.txt"
        # Opened now, since a process that hangs cannot open a file.
        self._stacks_file = self._stacks.open("a", encoding="utf-8") if watchdog_seconds else None
        self._seconds = watchdog_seconds
        self._wait()

    def beat(self, step: int, **values: float | None):
        """The process has finished `step`; `values` are its own, not those of all processes."""
        line = {"step": step, "time": round(time.time(), 3), **values}
        self._lines.write(json.dumps(line) + "\n")
        self._lines.flush()
        self._wait()

    def close(self):
        """Stop the watchdog and close the files. A file without stacks is removed."""
        if self._stacks_file is not None:
            faulthandler.cancel_dump_traceback_later()
            empty = not os.fstat(self._stacks_file.fileno()).st_size
            self._stacks_file.close()
            if empty:
                # The whole folder may be deleted.
                self._stacks.unlink(missing_ok=True)
        self._lines.close()

    def _wait(self):
        if self._stacks_file is not None:
            faulthandler.dump_traceback_later(self._seconds, file=self._stacks_file)


class RamReport:
    """Appends lines to `ram_rank<N>.jsonl`: at the start, after the first step, every so often, and out of memory.

    A step that accumulates batches has another line, before the last batch. Rows are GiB of this process: weights,
    gradients (after a step those before its update) and optimizer state as it holds them, the largest total so far,
    and the device's free memory. On a GPU rows also have torch's allocated and reserved memory. When
    memory runs out, torch's own table goes to `ram_summary_rank<N>.txt`. A context manager around the training.
    """

    def __init__(self, output_dir: str, rank: int, device: torch.device, every_steps: int, engine: Engine):
        """`every_steps` 0: only at the start and after the first step."""
        self._folder = Path(output_dir)
        self._rank = rank
        self._device = device
        self._every = every_steps
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
        """Called before the last of the accumulated batches of `step`."""
        if self._due(step):
            self._write("last batch", step)

    def backward_ends(self, step: int):
        """Called after the last backward pass of `step`; the update will free the gradients."""
        if self._due(step):
            self._gradients = size_in_bytes(self._engine.local_gradients())

    def step_ends(self, step: int):
        """Called after the update of `step`."""
        if self._due(step):
            self._write("step", step)
            self._gradients = None

    def _due(self, step: int) -> bool:
        return step == 1 or (self._every > 0 and step % self._every == 0)

    def _write(self, event: str, step: int | None):
        states = []
        for state in self._engine.optimizer.state.values():
            states += filter(torch.is_tensor, state.values())
        gradients = self._gradients
        if gradients is None:
            gradients = size_in_bytes(self._engine.local_gradients())
        free = free_memory(self._device)
        row = {
            "event": event,
            "step": step,
            "parameters_gib": size_in_bytes(self._engine.local_weights()) / GIB,
            "gradients_gib": gradients / GIB,
            "optimizer_gib": size_in_bytes(states) / GIB,
            "peak_gib": peak_memory_gib(self._device),
            "free_gib": None if free is None else free / GIB,
        }
        if self._device.type == "cuda":
            row["allocated_gib"] = torch.cuda.memory_allocated(self._device) / GIB
            row["reserved_gib"] = torch.cuda.memory_reserved(self._device) / GIB
        with (self._folder / f"ram_rank{self._rank}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
