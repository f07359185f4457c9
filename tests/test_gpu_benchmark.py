"""benchmarks/gpu: the order on one GPU, rehearsed on a CPU; what a part leaves when it fails; the report."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import parts, report, run
from benchmarks.measuring import halved

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).parents[1]
ORDER = [words for _, words in run.parts()]
# What a processor cannot do; and transformers' cache counts no tokens of a gated DeltaNet.
UNABLE = re.compile(r"needs CUDA|model is on a CPU|No module named 'fla'|get_seq_length")


def rehearsal(folder: Path, order: list[str]) -> list[dict]:
    """The rows of these parts of the order, with tiny models."""
    tiny = [" ".join(parts.REHEARSED.get(word, word) for word in words.split()) for words in order]
    parts.main([str(folder), *dict.fromkeys(tiny)])
    rows = report.read(folder / "gpu.jsonl")
    assert {row["part"] for row in rows} == {words.split()[0] for words in order}
    assert [row["note"] for row in rows if "note" in row and not UNABLE.search(row["note"])] == []
    return rows


def test_what_matters_most_fits_the_time():
    assert {words.split()[0] for words in ORDER} == parts.PARTS.keys() == report.PARTS.keys()
    # the step and the token of one size beside both peers, should every part need all of its time
    assert 2 * run.UNPACK + run.START / 2 + sum(seconds for seconds, _ in run.parts()[:8]) <= run.TOTAL


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="not a rehearsal on a GPU")
def test_a_part_of_the_order_runs_on_a_cpu(tmp_path, capsys):
    rows = rehearsal(tmp_path, ["machine", "step mid hope"])
    assert {("step", "hope", "step")} <= {(row["part"], row.get("model"), row["measure"]) for row in rows}
    report.main([str(tmp_path / "gpu.jsonl")])
    assert f"## {report.PARTS['step'][0]}" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="not a rehearsal on a GPU")
def test_the_whole_order_runs_on_a_cpu(tmp_path, monkeypatch):
    # a part sets it for kernels
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    rows = rehearsal(tmp_path, ORDER)
    measured = {(row["part"], row.get("model"), row["measure"]) for row in rows if "values" in row}
    assert {("decode", "hope, static cache", "token"), ("scan", "attention, 16 heads", "forward, ms")} <= measured
    assert all(row["equal"] == "3 of 3 tokens" for row in rows if "equal" in row)


@pytest.mark.processes
def test_a_part_that_is_stopped_or_fails_keeps_its_rows_and_the_order_goes_on(tmp_path):
    python = tmp_path / "python"
    python.write_text("""#!/bin/sh
    folder=$2; shift 2
    for part; do
      echo "== $part"
      echo "{\\"part\\": \\"$part\\", \\"measure\\": \\"s\\"}" >> "$folder/gpu.jsonl"
      case "$part" in
        "step pilot hope") exec sleep 60;;
        scan) echo 'a "driver" broke' >&2; exit 3;;
      esac
    done""")
    python.chmod(0o755)
    run.Run(tmp_path, python, limit=1).measure(run.parts())
    rows = report.read(tmp_path / "gpu.jsonl")
    notes = {row["part"]: row["note"] for row in rows if "note" in row}
    assert notes == {"step pilot hope": "stopped after 1 s", "scan": 'ended with status 3: a "driver" broke'}
    assert [row["part"] for row in rows if "note" not in row] == ORDER


def test_rows_are_halved_until_they_fit():
    tried = []

    def step(input_ids):
        tried.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    halved(step, torch.zeros(8, 1))
    assert tried == [8, 4, 2]


def test_a_kernel_that_is_wrong_is_found(monkeypatch):
    case = {"model": "auto", "dtype": "float32", "width": 32, "text": "documents"}
    assert parts.compare(**case)["wrong"] == []

    class Wrong(parts.HopeForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            if os.environ["HOPE_KERNELS"] == "auto":
                outputs.logits = outputs.logits * 1.001
            return outputs

    monkeypatch.setattr(parts, "HopeForCausalLM", Wrong)
    assert parts.LOGITS in parts.compare(**case)["wrong"]


def test_a_file_that_was_cut_short_is_reported(tmp_path, capsys):
    step = {"part": "step", "device": "a GPU", "preset": "mid", "tokens": 2048, "measure": "step"}
    kernel = {"part": "kernels", "device": "a GPU", "model": "fla", "dtype": "bfloat16", "width": 64, "text": "plain"}
    kernel |= {"measure": "error", "values": [0.01, 0.9], "torch": [0.01, 0.02], "worst": "a.weight"}
    rows = [kernel | {"wrong": ["a.weight"]}, step | {"model": "llama", "values": [1.0]}]
    rows.append(step | {"model": "hope", "values": [1.5]})
    file = tmp_path / "gpu.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + '\n{"part": "profile", "dev')
    report.main([str(file)])
    printed = capsys.readouterr()
    assert "| step, s | 2,048 | 1.5 | 1 (1.50) |" in printed.out and "left out" in printed.err
    assert "| 1.0e-02 (1.0e-02) | 9.0e-01 (2.0e-02) | **wrong**: a.weight |" in printed.out


@pytest.mark.processes
def test_the_parts_need_no_datasets():
    code = "import sys; sys.modules['datasets'] = None; from benchmarks.gpu import parts; parts.machine"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
