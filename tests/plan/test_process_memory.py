"""What a CPU process grows by in a step is what is planned, where the C library keeps no freed memory."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/process_memory.py"
# Tensors from 1 MiB on are mapped, in huge pages.
MAPPED = {"MALLOC_MMAP_THRESHOLD_": "1048576", "THP_MEM_ALLOC_ENABLE": "1", "OMP_NUM_THREADS": "1"}
TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("launcher", [[], TWO], ids=["one", "fsdp2"])
@pytest.mark.parametrize("sizes", ["256 --layers 4", "384", "512"])
def test_a_process_grows_by_what_is_planned(launcher, sizes, monkeypatch):
    monkeypatch.delenv("HOPE_KERNELS")
    words = ["--hidden_size", *sizes.split()]
    if launcher:
        words += ["--rows", "2"]
    command = [sys.executable, *launcher, str(PROGRAM), *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | MAPPED, timeout=300)
    ratio = re.search(r"grown by \d+ \((.*?)\)", done.stdout)
    assert ratio, done.stderr[-3000:]
    print(done.stdout)
    assert 0.95 < float(ratio[1]) < 1.08
