"""Writes checkpoints: at once, or in the background while the training continues.

For a background checkpoint every process first copies its part to CPU memory; the training waits only for this. Then a
thread of each process sends its part of the weights to the first, and writes and hashes the process's own files. Once
all are done (`written`, which the processes add to the sum of each step), `finish` seals the folder. Only one
checkpoint is pending at a time, so there is one copy, which is reused for the next.
"""

import copy
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from transformers import PreTrainedTokenizerBase

from hope_hf.common.files import disk_errors

from ..engines.base import Engine
from ..engines.guard import lost_process
from .hook import CheckpointHook
from .manifest import BEST, describe, last_good, publish, read_manifest, remove_leftovers, rotate, temporary_name
from .optimizer import OptimizerPart, optimizer_part, save_optimizer
from .run_folder import on_first_process
from .state_files import SHARED_STATE, save_state
from .weights import HostBuffers, WeightPart, WeightShards, save_weight_part, take_shards, weight_part

_OF_A_RANK = re.compile(r"(?:(?:optimizer_)?rank_|model-rank)(\d+)\.(?:json|safetensors)")


@dataclass
class _Content:
    """What this process writes: parts of weights and optimizer, and the state of the loop by file."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    state: dict[str, dict]
    shards: WeightShards | None = None
    """Weights that the first process gathers; None with `part`."""
    part: WeightPart | None = None
    optimizer: OptimizerPart | None = None
    """None if the model is saved alone."""


@dataclass
class _Pending:
    folder: Path
    step: int
    facts: dict
    name: str | None = None
    """The folder's final name; None: `checkpoint-<step>`."""
    thread: threading.Thread | None = None
    files: dict[str, dict] = field(default_factory=dict)
    """This process's own, as the manifest lists them."""
    error: Exception | None = None
    stall: float = 0.0
    """Seconds that the training waited."""
    write: float = 0.0
    """Seconds of this process's writing and hashing."""


class CheckpointWriter:
    """Writes `checkpoint-<step>` in the existing `output_dir`, and deletes the oldest beyond `save_total_limit`.

    None keeps all. All processes call all methods, in the same order. `only_model` leaves out the files that only a
    continued run needs. `hook` is called with each complete checkpoint, on the first process; a checkpoint that it
    still uses is deleted later. `in_parts`: every process writes its own part of the weights. `keep_every`: the
    checkpoints of these steps are never deleted. `mark`: the run's random id; folders without it are never deleted.
    """

    def __init__(
        self,
        output_dir: str | Path,
        save_total_limit: int | None = None,
        only_model: bool = False,
        hook: CheckpointHook | None = None,
        in_parts: bool = False,
        keep_every: Collection[int] = (),
        *,
        mark: str,
    ):
        self._output_dir = Path(output_dir)
        self._save_total_limit = save_total_limit
        self._only_model = only_model
        self._in_parts = in_parts
        self._keep_every = keep_every
        self._mark = mark
        self._hook = hook or CheckpointHook(None, output_dir, print)
        self._newest: Path | None = None
        self._pending: _Pending | None = None
        self._report: dict[str, float] = {}
        self._buffers = HostBuffers()
        self._rotation: threading.Thread | None = None

    def save(
        self,
        step: int,
        *,
        engine: Engine,
        tokenizer: PreTrainedTokenizerBase,
        state: dict[str, dict],
        background: bool = False,
        best: dict | None = None,
    ) -> Path:
        """Finish the pending checkpoint, then write one; with `background`, only start writing it.

        With `best`, facts for the manifest, it is the model alone in the folder `best`: no hook is called for it.

        The engine provides the whole model and every process's part of the optimizer's state. Tokenizer, "scheduler"
        and "trainer" of `state` are taken from the first process, "rank" from each.

        Returns:
            The folder. An existing one of the same step is replaced.

        Raises:
            ValueError: the disk is full or cannot be written; the checkpoints written before are intact.
        """
        self.finish()
        start = time.perf_counter()
        folder = broadcast_object_list([temporary_name(self._output_dir, step, self._mark)])[0]
        only_model = self._only_model or best is not None
        content = self._take(engine, tokenizer, state, only_model, background)
        _together(partial(self._make, folder), folder)
        _together(partial(_require_shared, folder), folder)
        facts = {"num_processes": PartialState().num_processes, "only_model": only_model, **(best or {})}
        self._pending = pending = _Pending(folder, step, facts, None if best is None else BEST)
        if background:
            pending.thread = threading.Thread(target=_write, args=(content, pending), name=f"checkpoint-{step}")
            pending.thread.start()
        else:
            _write(content, pending)
        pending.stall = time.perf_counter() - start
        if not background:
            self.finish()
        return self._output_dir / (pending.name or f"checkpoint-{step}")

    def _take(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, state: dict, only_model: bool, background: bool
    ) -> _Content:
        """This process's part of the checkpoint; copied if it is written in the background."""
        content = _Content(engine, tokenizer, copy.deepcopy(state) if background else state)
        if not background:
            self._buffers.clear()
        copied = self._buffers.copy if background else None
        if self._in_parts:
            content.part = weight_part(engine, copied)
        else:
            content.shards = take_shards(engine, self._buffers if background else None)
        if not only_model:
            content.optimizer = optimizer_part(engine, copied)
        return content

    def _make(self, folder: Path) -> None:
        if not PartialState().is_main_process:
            return
        # Not made again: without its run.json no run could continue from what is written there.
        if not self._output_dir.is_dir():
            raise OSError("the folder was deleted")
        remove_leftovers(self._output_dir, self._mark)
        folder.mkdir()

    @property
    def written(self) -> bool:
        """Whether this process has written its files of the pending checkpoint: once all have, call `finish`."""
        return self._pending is not None and not self._pending.thread.is_alive()

    def finish(self) -> None:
        """Wait for the pending checkpoint, if there is one, and give it its name.

        Raises:
            ValueError: as `save`.
        """
        if self._rotation is not None:
            self._rotation.join()
            self._rotation = None
        pending, self._pending = self._pending, None
        if pending is None:
            return
        start = time.perf_counter()
        if pending.thread is not None:
            pending.thread.join()
        if lost_process(pending.error) is not None:
            # Processes cannot agree after one is gone.
            raise pending.error

        _together(partial(_raise, pending.error), pending.folder)
        files = {}
        for part in gather_object([pending.files]):
            files |= part
        _together(partial(self._seal, pending, files), pending.folder)
        stall = pending.stall + time.perf_counter() - start
        self._report = {"train/checkpoint_stall_seconds": stall, "train/checkpoint_write_seconds": pending.write}

    def _seal(self, pending: _Pending, files: dict[str, dict]) -> None:
        if not PartialState().is_main_process:
            return
        written = publish(pending.folder, pending.step, pending.facts, files, self._mark, pending.name)
        if pending.name is not None:
            return
        self._newest = written
        self._hook.start(self._newest, pending.step)
        if pending.thread is None:
            self._rotate()
        else:
            # Deleting a large file takes about as long as copying it.
            self._rotation = threading.Thread(target=self._rotate)
            self._rotation.start()

    def stop_soon(self) -> None:
        """A signal ends the run: `close` will not wait for the hooks for long."""
        self._hook.stop_soon()

    def close(self) -> None:
        """Called after the run: wait for the hooks, then delete the checkpoints that were kept for them."""
        self._hook.wait()
        if self._newest is not None:
            self._rotate()

    def _rotate(self) -> None:
        rotate(
            self._output_dir, self._newest, self._mark, self._save_total_limit, self._hook.folders, self._keep_every
        )

    def take_report(self) -> dict[str, float]:
        """Metrics of the last completed checkpoint; returned once."""
        report, self._report = self._report, {}
        return report


class BestModel:
    """The best evaluation so far, and with `writer.save(best=...)` its model (`--keep_best`).

    `metric`: a key of the rows of evaluations, or "none". All processes make one.
    """

    def __init__(self, output_dir: str | Path, metric: str):
        self._metric, self._sign = metric, 1 if metric == "eval/accuracy" else -1
        self._value = on_first_process(PartialState(), lambda: _value_of_best(Path(output_dir) / BEST, metric))

    def beaten_by(self, row: dict[str, float]) -> dict | None:
        """The facts of a better evaluation for the manifest, which counts from now on; None if it is not better."""
        value = row.get(self._metric)
        # An infinite loss is never better.
        if value is None or not math.isfinite(value):
            return None
        if self._value is not None and self._sign * value <= self._sign * self._value:
            return None
        self._value = value
        return {"metric": self._metric, "value": value}


def _value_of_best(folder: Path, metric: str) -> float | None:
    try:
        facts = read_manifest(folder).facts
    except ValueError:
        return None
    value = facts.get("value")
    return value if facts.get("metric") == metric and isinstance(value, float) else None


def _require_shared(folder: Path) -> None:
    if not folder.is_dir():
        raise OSError("it must be on a disk that all machines share")


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


def _write(content: _Content, pending: _Pending) -> None:
    """Write this process's files; errors are kept in `pending`, since they must be raised in the main thread."""
    start = time.perf_counter()
    try:
        _write_files(content, pending.folder)
        rank, first = PartialState().process_index, PartialState().is_main_process
        # Only the first process makes subfolders; it may delete one while another process searches it.
        files = pending.folder.rglob("*") if first else pending.folder.glob("*")
        pending.files = describe(pending.folder, [path for path in files if _owner(path) == rank])
    except Exception as error:
        pending.error = error
    pending.write = time.perf_counter() - start


def _write_files(content: _Content, folder: Path) -> None:
    rank = PartialState().process_index
    # All processes take part in this, so it comes before anything that may fail on one of them.
    weights = {} if content.shards is None else content.shards.gather()
    if content.part is not None:
        save_weight_part(folder, rank, content.part)
    if content.optimizer is not None:
        save_state(folder / f"rank_{rank}", content.state["rank"])
        save_optimizer(folder, rank, content.optimizer)
    if PartialState().is_main_process:
        # Keep the running model's names: those that some families change for export do not load strictly.
        content.engine.save_model(folder, weights, save_original_format=False)
        content.tokenizer.save_pretrained(folder)
        for name in SHARED_STATE:
            save_state(folder / name, content.state[name])


def _owner(path: Path) -> int | None:
    """The rank that writes this file; None for a temporary file of safetensors."""
    if path.name.startswith("."):
        return None
    match = _OF_A_RANK.fullmatch(path.name)
    return int(match[1]) if match else 0


def _together(stage: Callable[[], None], folder: Path) -> None:
    """Run `stage` on every process; if it fails on one, all abandon `folder` and raise."""
    error = None
    try:
        with disk_errors():
            stage()
    except Exception as caught:
        error = caught
    reason = None if error is None else getattr(error, "strerror", None) or str(error) or repr(error)
    reasons = [reason for reason in gather_object([reason]) if reason is not None]
    if reasons:
        sentence = _abandon(folder, reasons[0])
        # Anything else is a bug.
        if error is None or isinstance(error, OSError):
            raise ValueError(sentence) from None
        raise error


def _abandon(folder: Path, problem: str) -> str:
    """Delete `folder` to free its space; returns the error sentence, with the last good checkpoint."""
    sentence = None
    if PartialState().is_main_process:
        shutil.rmtree(folder, ignore_errors=True)
        sentence = (
            f"No checkpoint could be written in --output_dir {folder.parent} ({problem}): free space there or make it "
            f"writable, then continue; last good checkpoint: {last_good(folder.parent)}."
        )
    return broadcast_object_list([sentence])[0]
