"""Launches that would waste a machine or spoil a run silently, refused in one sentence before anything is trained;
and a process that is gone, told by what the others meet."""

import hashlib
import os
import re
import socket
import warnings
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .placement import device_name

ALLOW_SINGLE_RANK = "HOPE_ALLOW_SINGLE_RANK"


class OneSidedError(ValueError):
    """A mistake that one process met, and perhaps no other, so each that meets it says so."""


def check_devices(accelerator: Accelerator):
    """One process on a machine of several GPUs, two processes on one GPU, bf16 on a GPU that has none.

    Raises ValueError on all processes alike. `HOPE_ALLOW_SINGLE_RANK=1` allows the first; where `CI` is set it warns.
    """
    if accelerator.device.type != "cuda":
        return
    visible = torch.cuda.device_count()
    _check_single_rank(accelerator.num_processes, visible)
    # Before the processes talk to each other: NCCL refuses two of them on one GPU in words of its own.
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if local > visible:
        raise ValueError(f"{local} processes share {visible} GPU(s): launch one process per GPU (--num_processes).")
    places = gather_object([f"{accelerator.device} of {socket.gethostname()}"])
    for place in places:
        if places.count(place) > 1:
            ranks = [rank for rank, other in enumerate(places) if other == place]
            raise ValueError(
                f"Ranks {', '.join(map(str, ranks))} share {place}: launch one process per GPU (--num_processes)."
            )
    if accelerator.mixed_precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"mixed_precision bf16 is not supported by {device_name(accelerator.device)}: set 'no'.")


def _check_single_rank(num_processes: int, visible: int):
    if num_processes > 1 or visible < 2 or os.environ.get(ALLOW_SINGLE_RANK) == "1":
        return
    sentence = (
        f"{visible} GPUs are visible and a single process trains: launch all of them with `accelerate launch "
        f"--config_file accelerate_configs/fsdp2.yaml --num_processes {visible} run_clm.py ...`, one with "
        f"`accelerate launch --gpu_ids 0 run_clm.py ...`, or set {ALLOW_SINGLE_RANK}=1."
    )
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        warnings.warn(sentence, stacklevel=2)
    else:
        raise ValueError(sentence)


def check_same_on_all(accelerator: Accelerator, what: dict[str, str]):
    """Every process must have the same of everything in `what` (name to fingerprint), and the same code.

    Raises ValueError on all processes alike, naming the first rank that differs from rank 0.
    """
    if accelerator.num_processes == 1:
        return
    everyone = gather_object([{"code": code_fingerprint(), **what, "host": socket.gethostname()}])
    first = everyone[0]
    for rank, own in enumerate(everyone):
        different = [name for name in first if name != "host" and own.get(name) != first[name]]
        if different:
            raise ValueError(
                f"Rank {rank} on {own['host']} has other {different[0]} than rank 0 on {first['host']}: give all "
                "machines the same files and flags."
            )


def code_fingerprint() -> str:
    """A hash of every Python file of the installed package."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def lost_process(error: BaseException | None) -> str | None:
    """What the error says of the connection to another process; None where it is about something else."""
    text = str(error)
    if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo/" in text):
        # Without the place in gloo's sources, and its advice.
        return re.sub(r"^\[\S*\] ", "", text.splitlines()[0]).partition(". ")[0]
    return None


def gone(reason: str) -> str:
    """What the user reads where another process is gone."""
    return (
        f"another process of this run is gone ({reason}): see what it said last or why it was killed, then repeat the "
        "command to continue; checkpoints that are complete are intact."
    )
