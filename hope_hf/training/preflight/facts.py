"""What the checks look at: numbers of one process, read before the run's memory is filled."""

import os
import shutil
import socket
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator

from hope_hf.plan import Planned
from hope_hf.step.arguments import Arguments

from ..engines.placement import free_memory
from .gpus import Gpu


@dataclass(frozen=True)
class Room:
    """Free bytes before the run has taken any; None where the system does not say."""

    device: int | None
    host: int | None
    disk: int


@dataclass(frozen=True)
class Text:
    """The data: rows of training (None: a stream), of one step over all processes, and of validation."""

    rows: int | None
    rows_per_step: int
    validation_rows: int
    description: str


@dataclass(frozen=True)
class Facts:
    """Everything that the checks need.

    Attributes:
        local_processes: on this machine.
        on_gpu: whether the run computes on one.
        in_parts: whether every process saves its own part of the weights.
        gpus: this process's own; without one all of the machine; or why they are not known.
        in_use: whether another process trains in the folder.
        held: bytes of the checkpoints in the folder.
        continues: the checkpoint to continue from.
        step: done before.
    """

    args: Arguments
    trackers: list[str]
    processes: int
    local_processes: int
    on_gpu: bool
    in_parts: bool
    gpus: list[Gpu] | str
    room: Room
    sizes: Planned
    text: Text
    in_use: bool
    held: int
    continues: Path | None
    step: int
    total_steps: int


def read_room(args: Arguments, accelerator: Accelerator) -> Room:
    """This process's free memory and disk."""
    folder = Path(args.output_dir).absolute()
    nearest = next(parent for parent in (folder, *folder.parents) if parent.exists())
    disk = shutil.disk_usage(nearest).free
    return Room(free_memory(accelerator.device), free_memory(torch.device("cpu")), disk)


def local_processes() -> int:
    """Processes of the run on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def own_gpus(gpus: list[Gpu] | str, device: torch.device) -> list[Gpu] | str:
    """Of the machine's GPUs that of this process; all of them where it has none."""
    if device.type != "cuda" or isinstance(gpus, str):
        return gpus
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    own = [gpu for gpu in gpus if gpu.uuid.removeprefix("GPU-") == uuid]
    return own or f"nvidia-smi does not list {device} of {socket.gethostname()}"


def held_bytes(output_dir: str) -> int:
    """Bytes of the checkpoints in a run's folder."""
    return sum(path.stat().st_size for path in Path(output_dir).glob("checkpoint-*/**/*") if path.is_file())
