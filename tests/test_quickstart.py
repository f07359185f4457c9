"""The notebook docs/quickstart.ipynb runs from its first cell to its last, and prints the expected output."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs/quickstart.ipynb"


@pytest.mark.long
def test_the_notebook_runs(tmp_path):
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    program = "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    # Its own process, as a kernel is: a training changes global settings.
    environment = {**os.environ, "MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert run.returncode == 0, run.stderr
    assert "step 60/60 | eval loss" in run.stdout
    assert "read twice, the same logits: False\nafter rolling back: True" in run.stdout
    sizes = [line.split("read, ")[1] for line in run.stdout.splitlines() if "tokens read, " in line]
    assert len(sizes) == 2 and len(set(sizes)) == 1
