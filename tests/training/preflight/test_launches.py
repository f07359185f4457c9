"""A check of a dry run that fails on one of two processes; test_engines.py has dry runs of every engine."""

import os
import re
import subprocess
import sys

import pytest
from engine_runs import SMALL
from training_runs import LLAMA, ROOT, TWO

from hope_hf.training.preflight.checks import CHECKS

FLAGS = [*LLAMA, *SMALL, "--max_train_steps", "4", "--per_device_train_batch_size", "2", "--dry_run"]
# The second process finds a full disk.
WORKER = """
import os, sys
from hope_hf.training import main
from hope_hf.training.preflight import facts
if os.environ['RANK'] == '1':
    facts.shutil.disk_usage = lambda path: __import__('types').SimpleNamespace(total=2**20, free=2**10)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
def test_a_check_that_fails_on_one_process_names_it_and_ends_all(corpus, tmp_path):
    (tmp_path / "worker.py").write_text(WORKER)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "HOME": str(tmp_path)}
    command = [sys.executable, *TWO, str(tmp_path / "worker.py"), *FLAGS, *corpus]
    command += ["--output_dir", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    found = re.findall(r"^(ok|warn|fail) +(\w+) +(.+)$", done.stdout, re.MULTILINE)
    assert done.returncode == 1 and [check for _, check, _ in found] == [*CHECKS, "step"], done.stdout + done.stderr
    (failed,) = [(check, text) for level, check, text in found if level != "ok"]
    assert failed[0] == "disk" and failed[1].endswith("(rank 1)")
    # Each of the processes ended with this status.
    assert set(re.findall(r"exitcode\s*: (\d+)", done.stderr)) == {"1"}
    assert not (tmp_path / "run").exists()
