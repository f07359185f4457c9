"""Heartbeats of every process: which rank hangs, where, and since when."""

import faulthandler
import json
import os
import time
from pathlib import Path


class Heartbeat:
    """Appends a line per step to `heartbeat_rank<N>.jsonl`; if none follows in time, writes the stacks of the process.

    After `watchdog_seconds` without a beat the stacks of all threads go to `stacks_rank<N>.txt`, and the process keeps
    waiting. Set it below `--ddp_timeout`, at which a collective ends the run without stacks. A harmless pause, such as
    a long evaluation, only leaves the file.
    """

    def __init__(self, output_dir: str, rank: int, watchdog_seconds: float):
        """0 seconds: no watchdog."""
        # On another machine's own disk the folder that the first process made does not exist.
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        self._lines = (Path(output_dir) / f"heartbeat_rank{rank}.jsonl").open("a", encoding="utf-8")
        self._stacks = Path(output_dir) / f"stacks_rank{rank}.txt"
        # Opened now: a process that hangs opens no file.
        self._stacks_file = self._stacks.open("a", encoding="utf-8") if watchdog_seconds else None
        self._seconds = watchdog_seconds
        self._wait()

    def beat(self, step: int, **values: float | None):
        """The process has finished `step`; `values` are its own, not those of all processes."""
        self._lines.write(json.dumps({"step": step, "time": round(time.time(), 3), **values}) + "\n")
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
