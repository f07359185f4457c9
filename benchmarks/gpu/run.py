"""Measures HOPE on one GPU in at most 560 s, without a network: `python benchmarks/gpu/run.py FOLDER [PART ...]`.

With parts, those of the order whose words begin so: `run.py FOLDER machine "step mid"` measures the machine and all
training steps of `mid`.
FOLDER/gpu.jsonl gets a row per measurement (parts.py), FOLDER/gpu.log the rest. The archives of pack.sh are unpacked
if build/gpu (or the folder PACK) has them. One process measures a part after the other, since it takes 15 to 20 s to
start on a virtual machine; it is replaced where a part fails or reaches its limit, and the order goes on behind this
part. Without a GPU the same order runs with tiny sizes.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Triton's cache holds paths, so it lies where pack.sh made it.
SITE = "/tmp/hope_gpu"
# seconds of all; of the archives; of a process until it measures
TOTAL, UNPACK, START = 560, 60, 90
# A line before each part (parts.py)
MARK = "== "
# Seconds of a part at most, and its words; what matters most comes first.
ORDER = """
20 machine
60 kernels fla bfloat16 64
60 step mid hope
30 step mid llama
60 step mid gated_deltanet
60 decode mid hope
40 decode mid llama
40 decode mid gated_deltanet
30 profile mid hope
40 graph mid hope
40 graph mid llama
120 train pilot
60 step pilot hope
30 step pilot llama
40 step pilot gated_deltanet
40 packed mid hope
40 scan
40 recomputed mid hope
40 step mid-hybrid hope
40 kernels fla bfloat16 128
40 kernels fla float32 64
30 step pilot hope_torch
"""

# What warm_cache.py compiles for the archive of pack.sh.
PACKED = ("mid", "pilot", "trainer", "mid-hybrid", "kernels fla bfloat16 64")


def parts() -> list[tuple[int, str]]:
    """Seconds and words of each part."""
    return [(int(seconds), words) for seconds, words in (line.split(" ", 1) for line in ORDER.split("\n") if line)]


def unpacked(order: list[tuple[int, str]]) -> list[str]:
    """Parts whose kernels the archive lacks: warm_cache.py compiles them beside the first parts, on other cores."""
    return [words for _, words in order if words.startswith("kernels") and words not in PACKED]


class Run:
    """Starts processes for the parts, and writes a row for each that did not end well.

    Args:
        python: the program that runs parts.py.
        limit: seconds of each part and of all others, instead of the order's.
    """

    def __init__(self, folder: Path, python: str, limit: float | None = None):
        self.folder, self.python, self.limit = folder, python, limit
        self.ends = time.monotonic() + TOTAL
        self.log = (folder / "gpu.log").open("a", encoding="utf-8")
        packed = {"PYTHONPATH": f"{SITE}:{HERE.parents[1]}", "TRITON_CACHE_DIR": f"{SITE}/cache"}
        # Triton's variables change what it compiles, and so which kernels it finds in the cache.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "HOPE_"))}
        self.environment = own | packed | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}

    def unpack(self, archives: list[Path]) -> None:
        for archive in archives:
            self._follow(["-m", "tarfile", "-e", str(archive), "/"], [(UNPACK, f"unpack {archive.name}")], UNPACK)

    def compile_beside(self, names: list[str]) -> list[subprocess.Popen]:
        """Processes that fill the cache with what these parts launch."""
        own = self.environment | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        log = (self.folder / "compiled.log").open("a", encoding="utf-8")
        command = [self.python, str(HERE / "warm_cache.py")]
        return [subprocess.Popen([*command, name], stdout=log, stderr=log, env=own) for name in names]

    def measure(self, order: list[tuple[int, str]]) -> None:
        while order:
            command = [str(HERE / "parts.py"), str(self.folder), *(words for _, words in order)]
            order = order[self._follow(command, order, START) :]

    def _follow(self, command: list[str], order: list[tuple[int, str]], seconds: float) -> int:
        """Run a command that marks each part it begins, until one fails; how many parts are behind it.

        `seconds`: until it begins the first.
        """
        process = subprocess.Popen(
            [self.python, *command], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=self.environment, start_new_session=True,
        )  # fmt: skip
        lines = queue.Queue()
        threading.Thread(target=self._read, args=(process.stdout, lines), daemon=True).start()
        begun, words, last, seconds = 0, order[0][1], "", self.limit or seconds
        until = time.monotonic() + seconds
        while True:
            try:
                line = lines.get(timeout=max(0.0, min(until, self.ends) - time.monotonic()))
            except queue.Empty:
                # the trainer's processes, too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                late = time.monotonic() >= self.ends
                self._note(words, f"stopped after {TOTAL} s in all" if late else f"stopped after {seconds} s")
                for _, words in order[begun:] if late else ():
                    self._note(words, "not reached")
                return len(order) if late else max(1, begun)
            if line is None:
                break
            self.log.write(line)
            self.log.flush()
            if line.startswith(MARK):
                own, words = order[begun]
                begun, seconds = begun + 1, self.limit or own
                until = time.monotonic() + seconds
                print(line, end="", flush=True)
            elif line.strip():
                last = line.strip()
        status = process.wait()
        if status:
            self._note(words, f"ended with status {status}: {last[:120]}")
        return max(1, begun) if status else len(order)

    @staticmethod
    def _read(stream, lines: queue.Queue) -> None:
        for line in stream:
            lines.put(line)
        lines.put(None)

    def _note(self, words: str, note: str) -> None:
        row = json.dumps({"part": words, "measure": "note", "note": note})
        print(row, flush=True)
        with (self.folder / "gpu.jsonl").open("a", encoding="utf-8") as rows:
            rows.write(row + "\n")


def main(argv: list[str]) -> None:
    if not argv:
        raise SystemExit("usage: python benchmarks/gpu/run.py FOLDER [PART ...]")
    folder, asked = Path(argv[0]).resolve(), argv[1:]
    order = [part for part in parts() if not asked or part[1].startswith(tuple(asked))]
    if not order:
        raise SystemExit(f"error: no part begins with {' or '.join(asked)}; the order is\n{ORDER.strip()}")
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, os.environ.get("PYTHON", sys.executable))
    archives = sorted(Path(os.environ.get("PACK", HERE.parents[1] / "build/gpu")).glob("*.tar.xz"))
    run.unpack(archives)
    compiling = run.compile_beside(unpacked(order) if archives else [])
    run.measure(order)
    for process in compiling:
        process.kill()


if __name__ == "__main__":
    main(sys.argv[1:])
