"""Progress in log files."""

import sys

import datasets
import pytest
from datasets import Dataset

from hope_hf.cli import progress


def test_of_lm_eval_only_bars_reach_a_log(monkeypatch, capsys):
    monkeypatch.setattr(progress, "LOG_SECONDS", 0.0)
    lines = progress.LogLines("%|")
    lines.write("some note\n")
    lines.write("\rRunning requests:  10%|#    | 4/40")
    assert capsys.readouterr().err == "Running requests:  10%|#    | 4/40\n"


@pytest.mark.parametrize("rank, seconds", [("0", 0.0), ("0", 1000.0), ("1", 0.0)])
def test_a_log_has_lines_of_a_bar_of_datasets_and_all_else(monkeypatch, capsys, rank, seconds):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(progress, "LOG_SECONDS", seconds)
    monkeypatch.setattr(datasets.tqdm, "mininterval", 0.0, raising=False)
    datasets.disable_progress_bars()

    def encode(rows):
        print("a warning", file=sys.stderr)
        return rows

    with progress.lines_of_datasets("Tokenizing"):
        Dataset.from_dict({"text": ["a"] * 9}).map(encode, batched=True, batch_size=3, desc="Tokenizing")
    lines = capsys.readouterr().err.splitlines()
    assert lines.count("a warning") == 3
    bars = [line for line in lines if line.startswith("Tokenizing:")]
    assert len(lines) == 3 + len(bars) and any("9/9 [" in bar for bar in bars) == (rank == "0" and not seconds)
    assert datasets.are_progress_bars_disabled()
