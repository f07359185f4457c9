"""A dry run under the launch files: the engine's own step on all processes, one line a check, the right status."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from engine_runs import NEEDS_DEEPSPEED, SMALL, launch
from training_runs import LLAMA, ROOT, TWO

from hope_hf.training.preflight.checks import CHECKS

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_python")]
LINE = re.compile(r"^(ok|warn|fail) +(\w+) +(.+)$", re.MULTILINE)
ENGINES = [
    ("ddp", 2),
    ("fsdp2", 2),
    ("fsdp1", 2),
    ("fsdp_hybrid", 4),
    pytest.param("deepspeed_zero2", 2, marks=NEEDS_DEEPSPEED),
    pytest.param("deepspeed_zero3_offload", 2, marks=NEEDS_DEEPSPEED),
]
# Processes among which the parameters are divided; accelerate itself drops FSDP on a CPU and trains lone copies.
PARTS = {"fsdp2": 2, "fsdp1": 2, "fsdp_hybrid": 2, "deepspeed_zero3_offload": 2}
FLAGS = [*LLAMA, *SMALL, "--max_train_steps", "4", "--per_device_train_batch_size", "2", "--dry_run"]


@pytest.mark.parametrize(("engine", "processes"), ENGINES)
def test_every_engine_takes_its_step(engine, processes, corpus, tmp_path):
    entry = {"folder": str(tmp_path / "run"), "flags": [*FLAGS, *corpus]}
    launch(engine, processes, [entry], tmp_path)
    told = (tmp_path / "machine_0.txt").read_text()
    whole = int(re.search(r"([\d,]+) parameters", told)[1].replace(",", "")) / PARTS.get(engine, 1)
    held = [int(count.replace(",", "")) for count in re.findall(r"holds ([\d,]+) float32", told)]
    assert len(held) == processes and all(0.9 * whole < count < 1.1 * whole for count in held), told
    found = LINE.findall(told)
    assert [name for _, name, _ in found] == [*CHECKS, "step"]
    assert {level for level, _, _ in found} == {"ok"}, found
    texts = {name: text for _, name, text in found}
    assert texts["processes"] == f"{processes} processes have the same flags, data and code"
    assert texts["step"].startswith("loss 5.")
    assert not (tmp_path / "run").exists()


def test_a_check_that_fails_on_one_process_names_it_and_ends_all(corpus, tmp_path):
    folder = tmp_path / "run"
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import os, sys\n"
        "from hope_hf.training import main\n"
        "from hope_hf.training.preflight import facts\n"
        "if os.environ['RANK'] == '1':\n"
        "    facts.shutil.disk_usage = lambda path: __import__('types').SimpleNamespace(total=2**20, free=2**10)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "HOME": str(tmp_path)}
    command = [sys.executable, *TWO, str(worker), *FLAGS, *corpus, "--output_dir", str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    found = {name: (level, text) for level, name, text in LINE.findall(done.stdout)}
    assert done.returncode == 1 and [*found] == [*CHECKS, "step"], done.stdout + done.stderr
    assert found["disk"][0] == "fail" and found["disk"][1].endswith("(rank 1)")
    assert found["step"][0] == "ok" and "9 ok, 0 warn, 1 fail" in done.stdout
    # Each of the processes ended with this status.
    assert set(re.findall(r"exitcode\s*: (\d+)", done.stderr)) == {"1"}
    assert not folder.exists() and not list(Path(tmp_path).glob("checkpoint-*"))
