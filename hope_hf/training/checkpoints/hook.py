"""`--checkpoint_hook`: runs a command after every complete checkpoint, while the training continues.

Hooks run one after the other, in the order of their steps, on the first process's machine. None of them can stop or
fail the training: their output and status go to `checkpoint_hook.log`, and a hook that fails gives one line on the
console.
"""

import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..process import StopSignal

LOG_FILE = "checkpoint_hook.log"
# Variables of launchers: with them a program in the hook would act as one of the run's processes.
OF_LAUNCHERS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_|NODE_)?(RANK|WORLD_SIZE)|ROLE_NAME|"
    r"(MASTER|ACCELERATE|TORCHELASTIC|FSDP|PARALLELISM_CONFIG|PMI|OMPI_COMM_WORLD|MV2_COMM_WORLD)_.*"
)
# The status of a shell that finds no program, or one that it may not run.
NO_PROGRAM = (126, 127)
# Seconds that torch's launcher gives its processes after a signal, unless its variable says otherwise.
LAUNCHER_TIMEOUT = 30.0
LEAVING = 5.0
"""Seconds of this time that the process itself needs."""
BACKLOG = 3


class CheckpointHook:
    """Runs `command`, a line for the shell, for each checkpoint; without a command it does nothing.

    Only the first process uses it. `say` prints a line for the user.
    """

    def __init__(self, command: str | None, output_dir: str | Path, say: Callable[[str], None]):
        self._command, self._output_dir, self._say = command, Path(output_dir), say
        self._calls: queue.SimpleQueue[tuple[Path, int]] = queue.SimpleQueue()
        self._open: list[Path] = []
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen | None = None
        self._deadline: float | None = None
        self._ended = False
        self._warned_of_backlog = False

    @property
    def folders(self) -> set[Path]:
        """Checkpoints whose hook runs or waits for its turn: they must not be deleted."""
        # A copy: the thread takes some out meanwhile.
        return set(list(self._open))

    def start(self, folder: Path, step: int) -> None:
        """The checkpoint in `folder` is complete. Returns at once."""
        if self._command is None:
            return
        self._open.append(folder)
        self._calls.put((folder, step))
        if self._thread is None:
            # A daemon: after an error the process ends without waiting for it, and the hook continues.
            self._thread = threading.Thread(target=self._serve, name="checkpoint-hook", daemon=True)
            self._thread.start()
        if len(self._open) > BACKLOG and not self._warned_of_backlog:
            self._warned_of_backlog = True
            self._say(
                f"warning: --checkpoint_hook is behind: {len(self._open)} checkpoints wait for it and are all kept; "
                "make it faster or raise --checkpointing_steps."
            )

    def stop_soon(self) -> None:
        """A signal has ended the run: `wait` must end before the launcher kills the remaining processes."""
        value = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "")
        seconds = float(value) if value.isdecimal() else LAUNCHER_TIMEOUT
        self._deadline = time.monotonic() + max(0.0, seconds - LEAVING)

    def wait(self) -> None:
        """Wait for all hooks, and print that; a signal, or the deadline after one, ends the waiting and the hook."""
        if not self._open:
            return
        until = "; Ctrl-C or SIGTERM ends the waiting"
        if self._deadline is not None:
            until = f", {max(0.0, self._deadline - time.monotonic()):.0f} s at most"
        self._say(f"Waiting for --checkpoint_hook of {self._names()}{until}.")
        with StopSignal("Ending the hook") as stop:
            while self._open and not stop.received:
                if self._deadline is not None and time.monotonic() > self._deadline:
                    break
                time.sleep(0.05)
        if self._open:
            self._ended = True
            self._say(f"warning: --checkpoint_hook of {self._names()} was ended or not run: run it by hand.")
            self._terminate()

    def _names(self) -> str:
        return ", ".join(folder.name for folder in list(self._open))

    def _terminate(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            # Ends the shell and all processes that it started. Without such a process, all of them have ended.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
                until = time.monotonic() + LEAVING / 2
                while time.monotonic() < until:
                    os.killpg(process.pid, 0)
                    time.sleep(0.05)
                os.killpg(process.pid, signal.SIGKILL)
        self._thread.join(LEAVING / 2)

    def _serve(self) -> None:
        while not self._ended:
            folder, step = self._calls.get()
            try:
                self._run(folder, step)
            # The log's disk is full, its folder deleted, or there is no process left to start.
            except OSError as error:
                self._warn(folder, error.strerror)
            finally:
                self._open.remove(folder)

    def _run(self, folder: Path, step: int) -> None:
        with (self._output_dir / LOG_FILE).open("a", encoding="utf-8") as log:
            # The command itself may hold a password, and is not written.
            print(f"=== step {step}: begins {time.strftime('%Y-%m-%d %H:%M:%S')}", file=log, flush=True)
            start = time.monotonic()
            process = self._process = subprocess.Popen(
                self._command,
                shell=True,
                env=environment(folder, step, self._output_dir),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Signals to the training's process group, such as Ctrl-C, must not reach the hook.
                start_new_session=True,
            )
            status = process.wait()
            # The hook's output may not end with a newline.
            print(f"\n=== step {step}: status {status} after {time.monotonic() - start:.1f} s", file=log)
        if status and not self._ended:
            what = "found no program to run" if status in NO_PROGRAM else "failed"
            self._warn(folder, f"{what}, status {status}")

    def _warn(self, folder: Path, reason: str | None) -> None:
        self._say(
            f"warning: --checkpoint_hook of {folder.name}: {reason}; the training goes on, "
            f"see {self._output_dir / LOG_FILE}."
        )


def environment(folder: Path, step: int, output_dir: Path) -> dict[str, str]:
    """The process's own environment without the launchers' variables, and with those that the hook reads."""
    variables = {name: value for name, value in os.environ.items() if not OF_LAUNCHERS.fullmatch(name)}
    variables["HOPE_CHECKPOINT"] = str(folder.absolute())
    variables["HOPE_STEP"] = str(step)
    variables["HOPE_OUTPUT_DIR"] = str(output_dir.absolute())
    return variables
