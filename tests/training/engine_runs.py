"""Runs of the trainer under an engine: in this process, or by `accelerate launch` as README has it."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import engine_worker
import pytest
import torch
import yaml
from training_runs import ROOT, curve, reset_accelerate

HERE = Path(__file__).parent
NEEDS_DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None or not (shutil.which("c++") or shutil.which("g++")),
    reason="DeepSpeed or the C++ compiler with which it builds itself is not installed",
)

ROWS = 8
SMALL = ["--block_size", "32", "--logging_steps", "1", "--learning_rate", "5e-3", "--max_grad_norm", "0.5"]
SMALL += ["--vector_learning_rate", "1e-2", "--cpu_threads", "1", "--save_total_limit", "9"]


def run_plan(
    engine: str, processes: int, runs: dict[str, dict], folder: Path, on_cpu: bool = True
) -> dict[str, list[dict]]:
    """The rows of every run: "single" on the CPU in this process, else by `accelerate launch`."""
    folders = {name: folder / {"continued": "hope", "fp16 continued": "fp16"}.get(name, name) for name in runs}
    entries = [{"folder": str(folders[name]), **run} for name, run in runs.items()]
    if engine == "single" and on_cpu:
        threads = torch.get_num_threads()
        engine_worker.run_all(entries)
        reset_accelerate()
        torch.set_num_threads(threads)
    else:
        launch(engine, processes, entries, folder, on_cpu)
    files = {name: Path(f"{folders[name]}.{index}.json") for index, name in enumerate(folders)}
    return {name: json.loads(file.read_text()) for name, file in files.items()}


def launch(config: str, processes: int, entries: list[dict], folder: Path, on_cpu: bool = True) -> None:
    """`accelerate launch` as README has it; on as many machines as the file says."""
    file = ROOT / "accelerate_configs" / f"{config}.yaml"
    machines = yaml.safe_load(file.read_text())["num_machines"]
    (folder / "plan.json").write_text(json.dumps(entries))
    paths = os.pathsep.join([str(ROOT), str(HERE)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    environment |= {"ACCELERATE_USE_CPU": "true"} if on_cpu else {}
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    launcher += ["--num_processes", str(processes)]
    if machines > 1:
        with socket.create_server(("127.0.0.1", 0)) as server:
            launcher += ["--main_process_port", str(server.getsockname()[1])]
    outputs = [(folder / f"machine_{machine}.txt").open("w+") for machine in range(machines)]
    launched = []
    for machine, output in enumerate(outputs):
        rank = ["--machine_rank", str(machine)] if machines > 1 else []
        command = [*launcher, *rank, str(HERE / "engine_worker.py"), str(folder / "plan.json")]
        launched.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT))
    statuses = [process.wait(timeout=400) for process in launched]
    for output in outputs:
        output.seek(0)
    assert not any(statuses), "".join(output.read()[-6000:] for output in outputs)


def same(rows: list[dict], expected: list[dict], rel: float) -> None:
    assert curve(rows) == pytest.approx(curve(expected), rel=rel)
    assert curve(rows, "train/grad_norm") == pytest.approx(curve(expected, "train/grad_norm"), rel=10 * rel)
    assert curve(rows, "eval/loss") == pytest.approx(curve(expected, "eval/loss"), rel=rel)
    assert curve(rows, "eval/tokens") == curve(expected, "eval/tokens")
    assert curve(rows, "level/1/updates") == curve(expected, "level/1/updates")
