"""Every strategy of accelerate_configs/ in one table, on this machine: memory, speed, set-up, bytes sent.

    python benchmarks/strategies.py [--ranks 1 2 4] [--block_size 64] [flags of run_clm.py that name the model]

Launch files for one process run on one rank, the others on more. A row is two short runs of run_clm.py, with 1 and
with 4 accumulated batches, and what hope_hf.plan says of them. On a machine without GPUs ranks are CPU processes.
Columns:

- peak: GiB of the largest process, as its heartbeat has it. "more": without what the program's imports take. planned:
  by arithmetic, on a CPU with what would be offloaded.
- tokens/s: over all ranks, median of the steps after the first two. "of DDP": over DDP's on as many ranks. "of one":
  over that of one process.
- set-up: seconds from the launch to the first step.
- sent: MB (10^6) per process and step, of fp32. The collectives are those of a profiled step; a ring sends each.
"""

import argparse
import gzip
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hope_hf.common.files import PROCESSES
from hope_hf.plan.launch import Launch
from hope_hf.plan.parsing import parse
from hope_hf.plan.verdict import Setting, settings

ROOT = Path(__file__).resolve().parents[1]
# Launch files with which the others are compared.
FIRST = ("single", "single_bf16", "ddp")
# A setting that the comments of a launch file name.
KEPT = "fsdp2, fsdp_reshard_after_forward: false"
# Steps by number of accumulated batches; the last step is profiled.
STEPS = {1: 6, 4: 3}
ROWS = 2
FP32 = 4
MACHINE = {} if torch.cuda.is_available() else {
    # Otherwise glibc keeps freed memory.
    "ACCELERATE_USE_CPU": "true", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536",
}  # fmt: skip
COLUMNS = ("strategy", "ranks", "peak", "more", "planned", "tokens/s", "of DDP", "of one", "set-up")
COLUMNS += ("sent, 1 batch", "planned", "sent, 4", "planned")


@dataclass(frozen=True)
class Run:
    """The result of one run, in bytes, tokens per second and seconds."""

    peak: float
    speed: float
    setup: float
    sent: float


def strategies(folder: Path) -> dict[str, Path]:
    """Launch files by the name of their row."""
    files = {file.stem: file for file in sorted((ROOT / "accelerate_configs").glob("*.yaml"))}
    kept = yaml.safe_load(files["fsdp2"].read_text(encoding="utf-8"))
    kept["fsdp_config"]["fsdp_reshard_after_forward"] = False
    (folder / "kept.yaml").write_text(yaml.safe_dump(kept), encoding="utf-8")
    return {name: files.pop(name) for name in FIRST} | files | {KEPT: folder / "kept.yaml"}


def start(file: Path, ranks: int, flags: list[str]) -> tuple[float, str | None]:
    """Launch run_clm.py on as many machines as the file names; the start time, and the error of a refused run."""
    machines = yaml.safe_load(file.read_text(encoding="utf-8"))["num_machines"]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    command += ["--num_processes", str(ranks)]
    if machines > 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            command += ["--main_process_port", str(server.getsockname()[1])]
    began, launched = time.time(), []
    for machine in range(machines):
        words = [*command, *(["--machine_rank", str(machine)] if machines > 1 else []), str(ROOT / "run_clm.py")]
        env = os.environ | MACHINE | {"PYTHONPATH": str(ROOT)}
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        launched.append(subprocess.Popen([*words, *flags], env=env, **output))
    outputs = [process.communicate()[0] for process in launched]
    if not any(process.returncode for process in launched):
        return began, None
    said = [line for output in outputs for line in output.splitlines() if line.startswith("error: ")]
    if not said:
        raise RuntimeError(f"{file.stem} on {ranks}: " + "\n".join(output[-3000:] for output in outputs))
    return began, said[0].removeprefix("error: ")


def measure(file: Path, ranks: int, batches: int, model: list[str], launch: Launch | None) -> Run | str:
    """One run, or the error message of a run that refused."""
    steps = STEPS[batches]
    with tempfile.TemporaryDirectory() as folder:
        flags = [*model, "--gradient_accumulation_steps", str(batches), "--max_train_steps", str(steps)]
        flags += ["--profile_steps", str(steps), "--output_dir", f"{folder}/run", "--logging_steps", "1"]
        flags += ["--dataset_name", "synthetic", "--max_train_samples", "400", "--max_eval_samples", "2"]
        flags += ["--eval_steps", "0", "--checkpointing_steps", "0", *(["--cpu_threads", "1"] if MACHINE else [])]
        began, refused = start(file, ranks, flags)
        if refused:
            return refused
        run = Path(folder, "run")
        beats = [_lines(run / PROCESSES / f"heartbeat_rank{rank}.jsonl") for rank in range(ranks)]
        rows = [row for row in _lines(run / "metrics.jsonl") if "train/loss" in row]
        first = beats[0][0]
        took = rows[0]["tokens"] / ranks / first["tokens_per_second"]
        with gzip.open(run / f"profile-{steps}-{steps}" / "trace_rank0.json.gz", "rt", encoding="utf-8") as file:
            trace = json.load(file)["traceEvents"]
        return Run(
            # Before the profiled step, whose trace takes memory as well.
            peak=max(lines[-2]["memory_gib"] for lines in beats) * 2**30,
            speed=statistics.median(row["train/tokens_per_second"] for row in rows[1:-1][-3:]),
            setup=first["time"] - took - began,
            sent=sent_bytes(trace, launch) if launch else 0,
        )


def sent_bytes(events: list[dict], launch: Launch) -> float:
    """Bytes that one process sends: an all-reduce in a ring sends a tensor nearly twice, other collectives once."""
    shards = launch.parts
    replicas = launch.replicas if launch.strategy.is_hybrid else launch.world_size
    ring = {
        "c10d::allreduce_": lambda dims: 2 * (replicas - 1) / replicas * sum(map(math.prod, dims[0])),
        "c10d::allgather_": lambda dims: (shards - 1) * sum(map(math.prod, dims[1])),
        "c10d::_allgather_base_": lambda dims: (shards - 1) / shards * math.prod(dims[0]),
        "c10d::_reduce_scatter_base_": lambda dims: (shards - 1) / shards * math.prod(dims[1]),
    }
    calls = [event for event in events if event.get("cat") == "cpu_op" and event["name"].startswith("c10d::")]
    return FP32 * sum(ring[call["name"]](call["args"]["Input Dims"]) for call in calls)


def plan(file: Path, ranks: int, batches: int, model: list[str]) -> tuple[Launch, Setting] | None:
    """The planner's launch and setting of the same run; None if planner and run refuse the launch."""
    words = [*model, "--accelerate_config", str(file), "--world_size", str(ranks)]
    try:
        question = parse([*words, "--gradient_accumulation_steps", str(batches)])
    except ValueError:
        return None
    launch = replace(question.launch, on_cpu=not torch.cuda.is_available())
    return launch, settings(replace(question, launch=launch))[0]


def imports() -> float:
    """Resident bytes of a process that has imported the trainer."""
    code = "import hope_hf.training.trainer, resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    env = os.environ | MACHINE | {"PYTHONPATH": str(ROOT)}
    return 1024 * int(subprocess.check_output([sys.executable, "-c", code], env=env, text=True))


def row(name: str, file: Path, ranks: int, model: list[str], base: float, speeds: dict) -> str:
    """A row of the table; `speeds` has the speeds of the rows before, and this one's is added."""
    plans = {batches: plan(file, ranks, batches, model) for batches in STEPS}
    found = {}
    for batches in STEPS:
        found[batches] = measure(file, ranks, batches, model, plans[batches] and plans[batches][0])
        if isinstance(found[batches], str):
            return f"| {name} | {ranks} | {found[batches]} |"
    one, planned = found[1], plans[1] and plans[1][1]
    speeds[name, ranks] = one.speed
    cells = [name, str(ranks), f"{one.peak / 2**30:.2f}", f"{(one.peak - base) / 2**30:.2f}"]
    on_cpu = planned.memory.host / ranks if MACHINE and planned else 0
    cells += [f"{(planned.memory.peak + on_cpu) / 2**30:.2f}" if planned else "-", f"{one.speed:,.0f}"]
    for other in (("ddp", ranks), ("single", 1)):
        cells.append(f"{one.speed / speeds[other]:.2f}" if other in speeds else "-")
    cells.append(f"{one.setup:.0f}")
    for batches, run in found.items():
        cells.append(f"{run.sent / 1e6:.1f}")
        cells.append(f"{plans[batches][1].traffic.total / 1e6:.1f}" if plans[batches] else "-")
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--block_size", type=int, default=64)
    parser.add_argument("--strategies", nargs="+", help="names of rows (default: all)")
    options, model = parser.parse_known_args(argv)
    model += ["--block_size", str(options.block_size), "--per_device_train_batch_size", str(ROWS)]
    speeds: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        files = strategies(Path(folder))
        base = imports() if MACHINE else 0
        print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
        for ranks in options.ranks:
            for name, file in files.items():
                content = yaml.safe_load(file.read_text(encoding="utf-8"))
                # Files for one process start one, and sharding needs two.
                fits = (ranks == 1) == (content["distributed_type"] == "NO")
                if fits and (options.strategies is None or name in options.strategies):
                    print(row(name, file, ranks, model, base, speeds), flush=True)


def _lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
