"""`benchmarks/trained_levels.py`: training through what levels learn, and its cost, at a tiny size."""

import json

import pytest

from benchmarks.trained_levels import FACTORS, main

pytestmark = pytest.mark.benchmarks
TINY = ["--width", "64", "--layers", "2", "--block_size", "64", "--period", "16", "--rows", "2", "--device", "cpu"]


def test_every_way_trains_and_its_levels_learn(tmp_path, monkeypatch):
    # the program sets this variable
    monkeypatch.setenv("HOPE_KERNELS", "auto")
    (tmp_path / "text.txt").write_text("".join(f"line {number} of a text that counts\n" for number in range(400)))
    words = ["--text", str(tmp_path / "text.txt"), "--held_out", str(tmp_path / "text.txt"), "--steps", "30"]
    words += ["--segments", "2", "--seeds", "1", "--vocab_size", "300", "--out", str(tmp_path / "report.json")]
    assert main([*words, *TINY]) == 0
    runs = {run["way"]: run for run in json.loads((tmp_path / "report.json").read_text())["runs"]}
    assert runs["plain"]["rates"] == [1.0] != runs["first_order"]["rates"]
    for run in runs.values():
        assert len(run["losses"]) == len(FACTORS) and run["losses"]["0.0"] != run["losses"]["1.0"]
        assert run["curve"][-1] < run["curve"][0]
