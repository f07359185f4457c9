"""The input of the checks: numbers of one process, read before the run fills its memory."""

import math
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from hope_hf.common.files import flush_folder, flush_to_disk, free_disk, unfinished
from hope_hf.common.process import local_processes, one_line
from hope_hf.plan import Planned, StepOptions, plan_running

from ..engines.base import Engine
from ..engines.placement import free_memory
from ..setup import RunParts


@dataclass(frozen=True)
class Gpu:
    """A GPU before the run uses it: percent of the last second in which it computed, bytes used, degrees Celsius."""

    busy: int
    used: int
    temperature: int


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes before the run has taken any; None if the system does not report them."""

    device: int | None
    host: int | None
    disk: int | None


@dataclass(frozen=True)
class Text:
    """The data: rows of training (None: a stream), of one step over all processes, and of validation."""

    rows: int | None
    rows_per_step: int
    validation_rows: int
    description: str


@dataclass(frozen=True)
class RoomOptions:
    """The flags on which the room of a run depends."""

    output_dir: str
    init: str
    gradient_checkpointing: str
    per_device_train_batch_size: int
    checkpointing_steps: int
    save_total_limit: int
    keep_every: int | None
    keep_best: str
    save_only_model: bool
    save_sharded: bool
    async_save: bool


@dataclass(frozen=True)
class Room:
    """What a run takes, and what was free before: the part of the facts that every run has, not only a dry one.

    Attributes:
        local_processes: number of processes on this machine.
        on_gpu: whether the run computes on a GPU.
        in_parts: whether every process saves its own part of the weights.
        unwritable: why no checkpoint can be written to the folder; None if one can.
        used: bytes of the checkpoints in the folder.
        step: number of steps done before.
    """

    options: RoomOptions
    processes: int
    local_processes: int
    on_gpu: bool
    in_parts: bool
    free: FreeMemory
    sizes: Planned
    unwritable: str | None
    used: int
    step: int
    total_steps: int


@dataclass(frozen=True)
class Facts(Room):
    """Everything that the checks need.

    Attributes:
        gpu: this process's GPU, or why it could not be read; None on a machine without one.
        in_use: whether another process trains in the folder.
        continues: the checkpoint to continue from.
    """

    trackers: list[str]
    gpu: Gpu | str | None
    text: Text
    in_use: bool
    continues: Path | None


def read_room(
    options: RoomOptions,
    step_options: StepOptions,
    engine: Engine,
    parts: RunParts,
    step: int,
    free: FreeMemory,
    is_rough: bool = False,
) -> Room:
    """The room of a run that is built and goes on after `step` steps; `free` was read before.

    `is_rough`: whether an estimate of the step is enough where it is far below what is free.
    """
    accelerator, processes = engine.accelerator, local_processes()
    on_gpu = accelerator.device.type == "cuda"
    room = 0.0
    if is_rough:
        # A run on a GPU does not ask what the step takes.
        room = math.inf if on_gpu else (free.host or 0) / processes
    return Room(
        options=options,
        processes=accelerator.num_processes,
        local_processes=processes,
        on_gpu=on_gpu,
        in_parts=engine.saves_parts(options.save_sharded),
        free=free,
        sizes=plan_running(parts.model, engine.launch(), step_options, processes, room),
        unwritable=write_problem(options.output_dir) if accelerator.is_main_process else None,
        used=used_bytes(options.output_dir),
        step=step,
        total_steps=parts.plan.total_steps,
    )


def read_gpu() -> Gpu | str | None:
    """`Facts.gpu`, read before this process uses the GPU; needs nvidia-ml-py."""
    if not torch.cuda.is_available():
        return "torch does not see it" if shutil.which("nvidia-smi") else None
    device = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        return Gpu(
            busy=torch.cuda.utilization(device),
            used=torch.cuda.device_memory_used(device),
            temperature=torch.cuda.temperature(device),
        )
    # The driver has its own error types.
    except Exception as error:
        return one_line(error)


def read_free_memory(output_dir: str, device: torch.device) -> FreeMemory:
    """This process's free memory, and that of the disk of a run's folder."""
    nearest = Path(output_dir).absolute()
    while not nearest.exists():
        nearest = nearest.parent
    return FreeMemory(free_memory(device), free_memory(torch.device("cpu")), free_disk(nearest))


def write_problem(output_dir: str) -> str | None:
    """Why a run could not write checkpoints to its folder, or None: they are written, flushed and renamed there.

    The folder is made if there is none, and is afterwards as before.
    """
    folder = Path(output_dir)
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    written, renamed = unfinished(folder / "trial"), unfinished(folder / "trial")
    try:
        written.mkdir(parents=True)
        with (written / "file").open("x", encoding="utf-8") as file:
            file.write("trial")
            flush_to_disk(file)
        flush_folder(written)
        written.rename(renamed)
        flush_folder(folder)
    except OSError as error:
        return error.strerror
    finally:
        for trial in (written, renamed):
            shutil.rmtree(trial, ignore_errors=True)
        # Another run may have begun there meanwhile.
        with suppress(OSError):
            for path in missing:
                path.rmdir()
    return None


def used_bytes(output_dir: str) -> int:
    """Bytes of the checkpoints in a run's folder."""
    return sum(path.stat().st_size for path in Path(output_dir).glob("checkpoint-*/**/*") if path.is_file())
