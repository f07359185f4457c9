"""The programs that measure speed by length, on a GPU, and in launches: small, every model has its row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from benchmarks import gpu_speed, peers_speed, sparse
from benchmarks.step import CountingCache

pytestmark = pytest.mark.benchmarks
LAUNCHES, LOSS = (Path(__file__).parents[1] / "benchmarks" / name for name in ("launches.py", "loss.py"))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    # the programs set it
    monkeypatch.setenv("HOPE_KERNELS", "auto")
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)


def test_every_model_has_every_measure(tmp_path, capsys):
    options = ["--output_dir", str(tmp_path), "--lengths", "64", "--rounds", "1", "--new_tokens", "2"]
    peers_speed.main([*options, "--vocab_size", "320", "--models", *peers_speed.DEFAULT_MODELS])
    rows = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    found = {(row["model"], row["tokens"], row["measure"]) for row in rows}
    expected = {("step", 64), ("prefill", 64), ("token", 64), ("cache", 64), ("peak", 64)}
    expected |= {("prefill", 128), ("token", 128), ("cache", 128)}
    assert found == {(model, tokens, name) for model in peers_speed.DEFAULT_MODELS for name, tokens in expected}
    assert all(value > 0 for row in rows for value in row["values"])
    # a recurrent model carries as much after any text, Llama twice as much after twice the text
    cache = {(row["model"], row["tokens"]): row["values"][0] for row in rows if row["measure"] == "cache"}
    assert cache["llama", 128] == pytest.approx(2 * cache["llama", 64], rel=0.01)
    assert all(cache[name, 128] == cache[name, 64] for name in peers_speed.DEFAULT_MODELS if name != "llama")
    printed = capsys.readouterr().out
    peers_speed.main([*options, "--report"])
    assert capsys.readouterr().out == printed and (tmp_path / "speed.png").stat().st_size > 10_000


def test_a_report_without_measurements(tmp_path, capsys):
    with pytest.raises(SystemExit):
        peers_speed.main(["--output_dir", str(tmp_path), "--report"])
    assert "speed.jsonl is missing: run this without --report first" in capsys.readouterr().err


def test_tensors_of_a_cache_count_once():
    shared = torch.zeros(4, 8)
    assert peers_speed.held_bytes([shared, shared[1:], {"again": (shared, torch.zeros(2, dtype=torch.int64))}]) == 144
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), 0)
    assert peers_speed.held_bytes(cache) == 2 * 4 * 24
    assert CountingCache().get_seq_length() == 0


def test_the_loss_without_logits_takes_less_memory():
    # in a process of its own: one that has computed before has memory to use again
    options = ["--tokens", "4096", "--vocab_size", "16000", "--width", "64", "--rounds", "1"]
    out = subprocess.run([sys.executable, str(LOSS), *options], check=True, capture_output=True, text=True).stdout
    rows = [line.split("|")[1:4] for line in out.splitlines()[2:]]
    sizes = {name.strip(): float(size.replace(",", "")) for name, size, _ in rows}
    assert sizes["without whole logits"] < sizes["with whole logits"] / 2


def test_a_gpus_table_on_a_cpu(tmp_path, capsys, monkeypatch):
    options = ["--output_dir", str(tmp_path), "--device", "cpu", "--presets", "tiny", "--rounds", "1"]
    monkeypatch.setattr(gpu_speed, "NEW_TOKENS", 1)
    gpu_speed.main([*options, "--lengths", "32", "64", "--tokens", "64", "--contexts", "64"])
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert {(row["model"], row["tokens"]) for row in rows} == {
        (name, length) for name in gpu_speed.MODELS for length in (32, 64) if (name, length) != ("hope_torch", 64)
    }
    for row in rows:
        if row["model"] == "hope_triton":
            assert "the model is on a CPU" in row["note"] and "tokens/s" not in row
            continue
        assert row["tokens/s"] > 0 and row["over llama"] > 0
        assert ("token ms" in row) == (row["tokens"] == 64)
    assert capsys.readouterr().out.count("\n| tiny |") == len(rows)


def test_sparse_attention_has_a_table_and_a_picture(tmp_path, capsys):
    options = ["--output_dir", str(tmp_path), "--rounds", "1", "--tokens", "2"]
    sparse.main([*options, "--lengths", "640"])
    sparse.main([*options, "--decode", "--contexts", "8"])
    rows = [json.loads(line) for line in (tmp_path / "sparse.jsonl").read_text().splitlines()]
    found = {(row["kind"], row["tokens"], row["measure"]) for row in rows if row["value"] > 0}
    mixers = {(kind, 640, measure) for kind in (sparse.SDPA, sparse.SPARSE) for measure in ("step", "peak")}
    assert found == mixers | {(sparse.SPARSE, 8, "token")}
    printed = capsys.readouterr().out
    assert printed.count("\n| 640 |") == 2 and "token after 8:" in printed
    assert (tmp_path / "sparse.png").read_bytes()[:4] == b"\x89PNG"


def test_what_fails_has_its_reason_in_its_row(tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(gpu_speed, "row_of", fail)
    gpu_speed.main(["--output_dir", str(tmp_path), "--device", "cpu", "--presets", "tiny", "--models", "llama"])
    rows = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["note"] for row in rows] == ["RuntimeError: no kernel"] * 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu_speed.main(["--output_dir", str(tmp_path)])
    assert "--device cuda: torch finds no GPU; --device cpu measures this processor" in capsys.readouterr().err


def test_launches_stay_below_three_times_llamas():
    # in a process of its own: it replaces functions of torch
    command = [sys.executable, str(LAUNCHES), "--preset", "tiny", "--length", "256"]
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ).stdout
    _, preset, length, llama, hope, ratio, plain, _ = (cell.strip() for cell in out.splitlines()[-1].split("|"))
    assert (preset, length) == ("tiny", "256")
    llama, hope, plain = (int(number.replace(",", "")) for number in (llama, hope, plain))
    assert float(ratio) == pytest.approx(hope / llama, abs=0.006) and llama < hope < 3 * llama
    # without kernels every chunk launches its own
    assert plain > 2 * hope
