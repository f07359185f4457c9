"""benchmarks/gpu: the order on one GPU, rehearsed on a CPU; a wrong kernel is found; the report."""

import os
import re
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import parts, report, run

pytestmark = pytest.mark.benchmarks
# What a processor cannot do; and transformers' cache counts no tokens of a gated DeltaNet.
UNABLE = re.compile(r"needs CUDA|model is on a CPU|No module named 'fla'|get_seq_length")
on_a_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="not a rehearsal on a GPU")


def rehearsal(folder: Path, order: list[str]) -> list[dict]:
    """The rows of these parts of the order, with tiny models."""
    tiny = []
    for words in order:
        tiny.append(" ".join(parts.REHEARSED.get(word, word) for word in words.split()))
    parts.main([str(folder), *dict.fromkeys(tiny)])
    rows = report.read(folder / "gpu.jsonl")
    assert {row["part"] for row in rows} == {words.split()[0] for words in order}
    for row in rows:
        assert "note" not in row or UNABLE.search(row["note"]), row
    return rows


@on_a_cpu
@pytest.mark.processes
def test_a_part_of_the_order_runs_on_a_cpu(tmp_path, capsys):
    rows = rehearsal(tmp_path, ["machine", "step mid hope"])
    assert ("step", "hope", "step") in {(row["part"], row.get("model"), row["measure"]) for row in rows}
    report.main([str(tmp_path / "gpu.jsonl")])
    assert f"## {report.PARTS['step'][0]}" in capsys.readouterr().out


@on_a_cpu
@pytest.mark.long
@pytest.mark.processes
def test_the_whole_order_runs_on_a_cpu(tmp_path, monkeypatch):
    # a part sets it for kernels
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    rows = rehearsal(tmp_path, [words for _, words in run.parts()])
    measured = {(row["part"], row.get("model"), row["measure"]) for row in rows if "values" in row}
    assert {("decode", "hope, static cache", "token"), ("scan", "attention, 16 heads", "forward, ms")} <= measured
    assert all(row["equal"] == "3 of 3 tokens" for row in rows if "equal" in row)


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
