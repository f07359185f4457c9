"""`benchmarks/trained_levels.py`: training through what levels learn, and its cost, at a tiny size."""

import json

import pytest

from benchmarks.trained_levels import FACTORS, main

pytestmark = pytest.mark.benchmarks
TINY = ["--width", "64", "--layers", "2", "--block_size", "64", "--period", "16", "--rows", "2", "--device", "cpu"]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """The program sets this variable."""
    monkeypatch.setenv("HOPE_KERNELS", "auto")


def test_every_way_trains_and_its_levels_learn(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} of a text that counts\n" for number in range(400)))
    arguments = ["--text", str(text), "--held_out", str(text), "--steps", "30", "--segments", "2", "--seeds", "1"]
    assert main([*arguments, *TINY, "--vocab_size", "300", "--out", str(tmp_path / "report.json")]) == 0
    runs = {run["way"]: run for run in json.loads((tmp_path / "report.json").read_text())["runs"]}
    assert [*runs] == ["plain", "first_order"]
    assert len({run["curve"][0] for run in runs.values()}) > 1 and runs["plain"]["rates"] == [1.0]
    for run in runs.values():
        assert len(run["losses"]) == len(FACTORS) and run["losses"]["0.0"] != run["losses"]["1.0"]
        assert run["curve"][-1] < run["curve"][0]
    assert runs["first_order"]["rates"] != [1.0]


def test_cost_is_a_ratio_to_the_first_way(capsys):
    assert main([*TINY, "--cost", "--steps", "2", "--vocab_size", "300", "--ways", "plain", "first_order"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].endswith("1.00 x plain") and lines[2].startswith("first_order: ")
