"""Refuses launches that would silently waste a machine or spoil a run, and detects that another process has ended.

A killed process closes its connections, and the collectives of the others fail (`lost_process` finds their errors).
gloo's do not always: if the process ends between two checks of its connection, gloo waits until `--ddp_timeout`, in an
all-reduce or in a send (`NeighbourWatch`).
"""

import hashlib
import os
import re
import select
import socket
import sys
import threading
import warnings
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from hope_hf.common.process import first_line, local_processes, print_error

from ..process import sum_over_processes
from .base import Engine
from .placement import device_name

ALLOW_SINGLE_RANK = "HOPE_ALLOW_SINGLE_RANK"


class OneSidedError(ValueError):
    """A mistake that possibly only one process finds, so every process that finds it prints it."""


def check_devices(accelerator: Accelerator):
    """Refuse one process on several GPUs, two processes on one GPU, and bf16 on a GPU without it.

    Raises ValueError on all processes. `HOPE_ALLOW_SINGLE_RANK=1` allows the first; if `CI` is set it only warns.
    """
    if accelerator.device.type != "cuda":
        return
    visible = torch.cuda.device_count()
    _check_single_rank(accelerator.num_processes, visible)
    # Before the processes communicate: NCCL refuses two of them on one GPU with its own message.
    local = local_processes()
    if local > visible:
        raise ValueError(f"{local} processes share {visible} GPU(s): launch one process per GPU (--num_processes).")
    ranks_by_device: dict[str, list[str]] = {}
    for rank, device in enumerate(gather_object([f"{accelerator.device} of {socket.gethostname()}"])):
        ranks_by_device.setdefault(device, []).append(str(rank))
    for device, ranks in ranks_by_device.items():
        if len(ranks) > 1:
            raise ValueError(f"Ranks {', '.join(ranks)} share {device}: launch one process per GPU (--num_processes).")
    if accelerator.mixed_precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(f"mixed_precision bf16 is not supported by {device_name(accelerator.device)}: set 'no'.")


def _check_single_rank(num_processes: int, visible: int):
    if num_processes > 1 or visible < 2 or os.environ.get(ALLOW_SINGLE_RANK) == "1":
        return
    sentence = (
        f"{visible} GPUs are visible and a single process trains: launch all of them with `accelerate launch "
        f"--config_file accelerate_configs/fsdp2.yaml --num_processes {visible} -m hope_hf train ...`, one with "
        f"`accelerate launch --gpu_ids 0 -m hope_hf train ...`, or set {ALLOW_SINGLE_RANK}=1."
    )
    if os.environ.get("CI", "").lower() not in ("", "0", "false"):
        warnings.warn(sentence, stacklevel=2)
    else:
        raise ValueError(sentence)


def check_same_on_all(accelerator: Accelerator, what: dict[str, str]):
    """Check that every process has the same fingerprints in `what` (by name), and the same code.

    Raises ValueError on all processes, naming the first rank that differs from rank 0.
    """
    if accelerator.num_processes == 1:
        return
    everyone = gather_object([{"code": code_fingerprint(), **what, "host": socket.gethostname()}])
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name in ("code", *what):
            if other.get(name) != first[name]:
                raise ValueError(
                    f"Rank {rank} on {other['host']} has other {name} than rank 0 on {first['host']}: give all "
                    "machines the same files and flags."
                )


def code_fingerprint() -> str:
    """A hash of every Python file of the installed package."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        name = str(file.relative_to(package))
        digest.update(name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def lost_process(error: BaseException | None) -> str | None:
    """The error's message about the connection to another process; None for other errors."""
    if isinstance(error, torch.distributed.DistError) or (isinstance(error, RuntimeError) and "gloo/" in str(error)):
        # Without gloo's source location and advice.
        return re.sub(r"^\[\S*\] ", "", first_line(error)).partition(". ")[0]
    return None


def gone(reason: str) -> str:
    """The message for the user if another process has ended, or does not connect."""
    if "timed out connecting" in reason:
        # gloo gives up after a few refusals, long before the timeout.
        what = "cannot be reached"
        fix = "if a launcher started killed processes again, end all launchers"
    elif re.search("timed? ?out", reason, re.IGNORECASE):
        what = "did not come within --ddp_timeout"
        fix = "see what it does (its last line, processes/stacks_rank<N>.txt in --output_dir), or raise --ddp_timeout"
    else:
        what, fix = "is gone", "see what it said last or why it was killed"
    return (
        f"another process of this run {what} ({reason}): {fix}, then repeat the command to continue; checkpoints "
        "that are complete are intact."
    )


PATIENCE = 5.0
"""Seconds in which the collective may fail by itself: its error says more."""


class NeighbourWatch:
    """During training, ends this process soon after one of `neighbours` ends; a context manager."""

    def __init__(self, neighbours: list[int]):
        """`neighbours`: process ids; empty except on Linux."""
        self._neighbours = neighbours
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="neighbours", daemon=True)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._left.set()
        self._thread.join()

    def _watch(self):
        with ExitStack() as opened:
            ends, processes = select.poll(), {}
            for pid in self._neighbours:
                # Some sandboxes forbid this call.
                with suppress(OSError):
                    descriptor = os.pidfd_open(pid)
                    opened.callback(os.close, descriptor)
                    processes[descriptor] = pid
                    ends.register(descriptor, select.POLLIN)
            while processes and not self._left.wait(0.1):
                ended = ends.poll(0)
                if ended and not self._left.wait(PATIENCE):
                    print_error(gone(f"process {processes[ended[0][0]]} has ended"), 1, everywhere=True)
                    # The main thread may never return.
                    os._exit(1)


def find_neighbours() -> list[int]:
    """Ids of the run's other processes on this machine and in this container; all processes call it.

    Empty except on Linux: only there can a process wait for the end of one that is not its child.
    """
    if not sys.platform.startswith("linux"):
        return []
    container, own_pid = (socket.gethostname(), os.readlink("/proc/self/ns/pid")), os.getpid()
    everyone = gather_object([(container, own_pid)])
    return [pid for other, pid in everyone if other == container and pid != own_pid]


@torch.no_grad()
def weights_are_finite(engine: Engine) -> bool:
    """Whether all weights are finite, the same on all processes. Some buffers hold infinities, so none are checked."""
    broken = False
    for part in engine.weight_slices():
        is_weight = not engine.trained.keys().isdisjoint(part.names)
        if is_weight and not part.tensors["weight"].isfinite().all():
            broken = True
    return not any(sum_over_processes(engine.accelerator, broken))


def require_finite_weights(engine: Engine, source: object) -> None:
    """ValueError, on all processes, if weights that came from `source` are not finite."""
    if not weights_are_finite(engine):
        raise ValueError(
            f"{source} holds weights that are not finite, its run has diverged: begin from an earlier checkpoint "
            "(--model_name_or_path), with a lower --learning_rate and a new --output_dir."
        )
