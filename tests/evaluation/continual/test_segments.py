"""Segments by the checkpoints of a run: losses, forgetting and transfer, and what cannot be measured."""

import json
import shutil

import pytest
import torch
import yaml

from hope_hf.evaluation import main
from hope_hf.evaluation.checkpoints import Checkpoint
from hope_hf.evaluation.continual.segments import Measured, by_checkpoint, cut, forgetting, transfer
from hope_hf.evaluation.perplexity import perplexity


@pytest.fixture
def run(folders, tmp_path):
    """A run with two different checkpoints."""
    for step, kind in ((1, "llama"), (2, "hope")):
        shutil.copytree(folders[kind], tmp_path / f"run/checkpoint-{step}")
    return str(tmp_path / "run/checkpoint-*")


@pytest.fixture
def segments(tmp_path, texts):
    """Write a file of segments; each given corpus gets the text of its own."""

    def write(**corpora) -> str:
        content = {}
        for index, (name, settings) in enumerate(corpora.items()):
            (tmp_path / f"{name}.txt").write_text(texts[index])
            content[name] = {"files": str(tmp_path / f"{name}.txt")} | settings
        (tmp_path / "segments.yaml").write_text(yaml.safe_dump({"corpora": content}, sort_keys=False))
        return str(tmp_path / "segments.yaml")

    return write


def evaluate(run, segments, *flags) -> int:
    flags = ["--segments", segments, "--device", "cpu", "--cpu_threads", 1, *flags]
    return main(["--suite", "continual", "--model_name_or_path", run, *map(str, flags)])


def test_every_segment_by_every_checkpoint(run, segments, subject, arguments, tmp_path):
    path = segments(one={}, two={"max_tokens": 90}, three={})
    assert evaluate(run, path, "--output_dir", tmp_path / "eval") == 0
    record = json.loads((tmp_path / "eval" / "results.json").read_text())
    bits, moved, rows = record["results"]["continual"]["tables"].values()
    assert [list(row) for row in bits] == [["step", "tokens", "one", "two", "three"]] * 2
    assert [row["segment"] for row in rows] == ["one", "two", "three"] * 2
    assert [row["segment"] for row in moved] == ["one", "two", "three", "mean"]
    assert rows[1]["n"] == 90
    assert (tmp_path / "eval" / "continual.png").read_bytes().startswith(b"\x89PNG")
    # The same as the suite perplexity on that text.
    result = perplexity(arguments(validation_file=str(tmp_path / "three.txt")), subject("hope"))
    (whole,), *_ = result.tables.values()
    for name in ("n", "loss", "bits_per_byte"):
        assert rows[5][name] == pytest.approx(whole[name], rel=1e-6)


def test_forgetting_is_against_the_best_earlier_checkpoint_and_transfer_since_the_segments_end():
    losses = torch.tensor([3.0, 1.0, 2.0, 1.5])[:, None].expand(4, 600) + torch.linspace(-0.5, 0.5, 600)
    falling = torch.tensor([4.0, 3.0, 2.0, 1.0])[:, None].expand(4, 600)
    checkpoints = [Checkpoint(f"checkpoint-{step}", step, 10 * step) for step in (1, 2, 3, 4)]
    measured = [Measured("a", losses, 1200), Measured("b", falling, 600)]
    assert forgetting(measured[0], 3) == (pytest.approx(0.5), pytest.approx(0.0, abs=1e-6))
    a, b, mean = transfer(checkpoints, measured)
    # The share of `a` ends at step 2 of 4.
    assert (a["ends_at"], b["ends_at"]) == ("2", "4")
    assert [row["forgetting"] for row in (a, b, mean)] == pytest.approx([0.5, -1.0, -0.25])
    assert a["backward_transfer"] == mean["backward_transfer"] == pytest.approx(-0.5)
    assert b["backward_transfer"] is None
    rows = by_checkpoint(checkpoints, measured)
    assert [row["forgetting"] for row in rows[:2]] == [None, None] and len(rows) == 8
    assert rows[0]["bits_per_byte"] == pytest.approx(3.0 / 0.6931472 * 600 / 1200, rel=1e-6)


def test_a_text_is_cut_at_its_tokens(subject, texts):
    loaded = subject("llama")
    short = cut(loaded, texts[1], 50)
    assert texts[1].startswith(short) and abs(len(loaded.encode(short)) - 50) <= 1
    assert cut(loaded, texts[0], 10**6) == texts[0]
    # Special tokens that a text spells are text.
    assert cut(loaded, "<|endoftext|> " * 3, 5) == loaded.tokenizer.decode(loaded.encode("<|endoftext|> " * 3)[:5])


def test_what_cannot_be_measured(run, segments, folders, tmp_path, capsys):
    segments(one={}, two={})
    (tmp_path / "whole.yaml").write_text((tmp_path / "segments.yaml").read_text())
    whole = str(tmp_path / "whole.yaml")
    corpora = [
        ({"one": {}}, "one segment"),
        ({"one": {}, "two": {"max_tokens": 10**6}}, "max_tokens 1,000,000"),
        ({"one": {}, "two": {"max_documents": 9}}, "corpus two"),
        ({"one": {}, "two": {"limit": 3}}, "'limit'"),
    ]
    for settings, words in corpora:
        assert evaluate(run, segments(**settings), "--output_dir", tmp_path / "eval") == 2
        error = capsys.readouterr().err
        assert words in error and "--segments" in error and error.count("\n") == 1
    calls = [
        (run.replace("run/", "walk/"), whole, [], "walk/checkpoint-*"),
        (folders["llama"], whole, [], "two checkpoints"),
        (run, whole, ["--suite", "continual,sample"], "--suite continual"),
        (run, tmp_path / "none.yaml", [], "--segments"),
    ]
    for name, file, flags, words in calls:
        assert evaluate(name, file, *flags, "--output_dir", tmp_path / "eval") == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert not (tmp_path / "eval").exists()
