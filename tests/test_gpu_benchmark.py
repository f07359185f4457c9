"""benchmarks/gpu: the order on one GPU, rehearsed on a CPU; what a part leaves when it fails; the report; the pack."""

import itertools
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
from benchmarks.speed import Peers, make_parser

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks/gpu"
ORDER = [words.split() for _, words in run.parts()]


@pytest.fixture
def rows(tmp_path):
    return parts.Rows(tmp_path / "gpu.jsonl", "a part")


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
    return path


def test_every_part_exists_and_what_matters_most_fits_the_time():
    assert {part for part, *_ in ORDER} == parts.PARTS.keys() == report.PARTS.keys()
    options = make_parser().parse_args(["peers"])
    for part, *words in ORDER:
        if part not in ("machine", "kernels", "scan"):
            # the trainer trains HOPE
            preset, model = (*words, "hope")[:2]
            assert Peers(options, preset).size.hidden_size in (768, 1024)
            assert make_parser().parse_args(["peers", "--models", model]).models == [model]
    # the step and the token of one size beside both peers, should every part need all of its time
    assert 2 * run.UNPACK + run.START / 2 + sum(seconds for seconds, _ in run.parts()[:8]) <= run.TOTAL


# What a processor cannot do; and transformers' cache counts no tokens of a gated DeltaNet.
UNABLE = re.compile(r"needs CUDA|model is on a CPU|No module named 'fla'|get_seq_length")


@pytest.mark.processes
@pytest.mark.skipif(torch.cuda.is_available(), reason="not a rehearsal on a GPU")
def test_the_whole_order_runs_on_a_cpu(tmp_path, capsys, monkeypatch):
    # a part sets it for kernels
    monkeypatch.setenv("TRITON_F32_DEFAULT", "")
    tiny = [[parts.REHEARSED.get(word, word) for word in words] for words in ORDER]
    parts.main([str(tmp_path), *dict.fromkeys(map(" ".join, tiny))])
    found = report.read(tmp_path / "gpu.jsonl")
    assert {row["part"] for row in found} == parts.PARTS.keys()
    assert [row["note"] for row in found if "note" in row and not UNABLE.search(row["note"])] == []
    measured = {(row["part"], row.get("model"), row["measure"]) for row in found if "values" in row}
    wanted = {"step": ["step"], "decode": ["prefill", "token", "cache"]}
    assert {(words[0], words[-1], name) for words in tiny for name in wanted.get(words[0], ())} <= measured
    assert {("decode", "hope, static cache", "token"), ("scan", "attention, 16 heads", "forward, ms")} <= measured
    assert all(row["equal"] == "3 of 3 tokens" for row in found if "equal" in row)
    capsys.readouterr()
    report.main([str(tmp_path / "gpu.jsonl")])
    printed = capsys.readouterr().out
    # kernels and graphs have notes alone
    titles = [title for part, (title, _) in report.PARTS.items() if part not in ("kernels", "graph")]
    assert all(f"## {title}" in printed for title in titles) and "## What did not run" in printed
    assert (tmp_path / "gpu-tiny.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.processes
def test_a_part_that_is_stopped_or_fails_keeps_its_rows_and_the_order_goes_on(tmp_path, capsys):
    text = """folder=$2; shift 2
    for part; do
      echo "== $part"
      echo "{\\"part\\": \\"$part\\", \\"measure\\": \\"s\\"}" >> "$folder/gpu.jsonl"
      case "$part" in
        "step pilot hope") exec sleep 60;;
        scan) echo 'a "driver" broke' >&2; exit 3;;
      esac
    done"""
    run.Run(tmp_path, program(tmp_path / "python", text), limit=1).measure(run.parts())
    found = report.read(tmp_path / "gpu.jsonl")
    notes = {row["part"]: row["note"] for row in found if "note" in row}
    assert notes == {"step pilot hope": "stopped after 1 s", "scan": 'ended with status 3: a "driver" broke'}
    assert [row["part"] for row in found if "note" not in row] == [words for _, words in run.parts()]
    assert capsys.readouterr().out.count("== ") == len(ORDER)


def test_parts_are_measured_by_the_beginning_of_their_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PACK", str(tmp_path))
    monkeypatch.setattr(run.Run, "measure", lambda self, order: measured.extend(words for _, words in order))
    assert run.unpacked([(1, "step mid hope"), (1, run.PACKED[-1]), (1, "kernels x")]) == ["kernels x"]
    measured = []
    run.main([str(tmp_path), "step mid", "machine"])
    assert measured[0] == "machine" and measured[1:] and all(words.startswith("step mid") for words in measured[1:])
    with pytest.raises(SystemExit, match="error: no part begins with stepp; the order is"):
        run.main([str(tmp_path / "none"), "stepp"])
    assert not (tmp_path / "none").exists()


@pytest.mark.processes
def test_the_order_ends_with_its_time(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "TOTAL", 1)
    run.Run(tmp_path, program(tmp_path / "python", "echo '== machine'; exec sleep 60")).measure(run.parts()[:3])
    notes = [row["note"] for row in report.read(tmp_path / "gpu.jsonl")]
    assert notes == ["stopped after 1 s in all", "not reached", "not reached"]


def test_a_part_that_raises_has_a_note_with_the_first_line(rows, monkeypatch):
    def broken(rows, preset, model):
        rows.write(measure="s", values=[1.0])
        raise MemoryError("no room\nfor anything")

    monkeypatch.setitem(parts.PARTS, "step", broken)
    parts.main([str(rows.file.parent), "step tiny hope"])
    first, second = report.read(rows.file)
    assert first["values"] == [1.0]
    assert (second["model"], second["note"]) == ("hope", "MemoryError: no room")


def test_rows_are_halved_until_they_fit(rows, monkeypatch):
    tried = []

    def step(network, input_ids, **inputs):
        tried.append(len(input_ids))
        if len(input_ids) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(parts, "train_step", step)
    monkeypatch.setattr(parts, "LENGTHS", (8, 64))
    parts.packed(rows, "tiny", "hope")
    assert tried[:3] == [8, 4, 2] and set(tried[3:]) == {1, 2}
    assert {(row["tokens"], row["documents"]) for row in report.read(rows.file)} == set(
        itertools.product((8, 64), (False, True))
    )
    with pytest.raises(torch.OutOfMemoryError):
        halved(lambda ids: step(None, ids.repeat(3, 1)), torch.zeros(4, 1))


def test_a_kernel_that_is_wrong_is_found(monkeypatch):
    case = {"model": "auto", "dtype": "float32", "width": 32, "text": "documents"}
    assert parts.compare(**case)["wrong"] == []

    class Wrong(parts.HopeForCausalLM):
        def forward(self, *args, **kwargs):
            outputs = super().forward(*args, **kwargs)
            if os.environ["HOPE_KERNELS"] == "auto":
                outputs.logits = outputs.logits * self.factor
            return outputs

    monkeypatch.setattr(parts, "HopeForCausalLM", Wrong)
    for Wrong.factor in (1.001, float("nan")):
        found = parts.compare(**case)
        assert parts.LOGITS in found["wrong"] and found["worst"] in found["wrong"]


def test_a_file_that_was_cut_short_is_reported(tmp_path, capsys):
    about = {"part": "step", "device": "a GPU", "preset": "mid", "tokens": 2048, "measure": "step"}
    kernel = {"part": "kernels", "device": "a GPU", "model": "fla", "dtype": "bfloat16", "width": 64}
    kernel |= {"text": "plain", "measure": "error", "values": [0.01, 0.9], "torch": [0.01, 0.02]}
    lines = [
        kernel | {"worst": "a.weight", "wrong": ["a.weight"]},
        about | {"model": "llama", "values": [1.0]},
        about | {"model": "hope", "values": [1.5]},
        {"part": "step mid gated_deltanet", "measure": "note", "note": "stopped after 25 s"},
    ]
    file = tmp_path / "gpu.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + '\n{"part": "profile", "dev')
    report.main([str(file)])
    printed = capsys.readouterr()
    assert "| step, s | 2,048 | 1.5 | 1 (1.50) |" in printed.out and "left out" in printed.err
    assert "| 1.0e-02 (1.0e-02) | 9.0e-01 (2.0e-02) | **wrong**: a.weight |" in printed.out
    assert "- step mid gated_deltanet: stopped after 25 s" in printed.out and (tmp_path / "gpu-mid.png").is_file()


@pytest.mark.processes
def test_the_parts_need_no_datasets():
    code = "import sys; sys.modules['datasets'] = None; from benchmarks.gpu import parts; parts.machine"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.processes
@pytest.mark.parametrize("text, sentence", [
    ("exit 1", "is not a Python 3.12 with torch, transformers and einops: name one that is"),
    ('case "$*" in *download*) exit 1;; esac', "pip cannot download triton 3.7.1: check the network"),
])  # fmt: skip
def test_a_pack_that_cannot_be_made_has_one_sentence(text, sentence, tmp_path):
    copy = tmp_path / "benchmarks/gpu"
    copy.mkdir(parents=True)
    (copy / "pack.sh").write_text((FOLDER / "pack.sh").read_text())
    (copy / "run.py").write_text(f'SITE = "{tmp_path}/site"\n')
    (tmp_path / "constraints.txt").write_text("fla-core==0.6.0\n")
    environment = os.environ | {"PYTHON": str(program(tmp_path / "python", text))}
    done = subprocess.run(["bash", copy / "pack.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("error: ") and sentence in done.stderr
