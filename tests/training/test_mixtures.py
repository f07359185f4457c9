"""Runs on mixtures and shards: continued exactly, and refused in a sentence.

tests/training/engines/test_engines.py compares two processes with one (the run "shards")."""

import re
from pathlib import Path

import pytest
from training_runs import curve, forget_the_end

SAVES = ["--checkpointing_steps", "2", "--eval_steps", "3", "--max_train_steps", "5", "--save_total_limit", "9"]


def test_a_run_from_shards_continues_as_if_it_had_not_stopped(run, tmp_path, shards, capsys):
    data = shards
    status, whole = run("a", *SAVES, data=data)
    assert status == 0 and re.search(r"\(a (69|70)\.\d%, b (29|30)\.\d%\)", capsys.readouterr().out)
    forget_the_end(tmp_path / "a", 4, 5)
    status, continued = run("a", *SAVES, data=data)
    assert status == 0 and curve(continued) == curve(whole)
    assert curve(continued, "eval/loss") == curve(whole, "eval/loss")


def test_the_mixture_itself_gives_the_run_of_its_shards(run, shards, corpus):
    _, prepared = run("shards", *SAVES, data=shards)
    raw = ["--dataset_mixture", str(Path(shards[1]).parent / "mix.yaml"), "--tokenizer_name", corpus[5]]
    status, rows = run("raw", *SAVES, "--validation_split_percentage", "10", data=raw)
    assert status == 0 and curve(rows) == curve(prepared)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--train_file", "x"], "--train_file and --train_shards"),
        (["--streaming"], "--streaming is for"),
        (["--document_boundary", "carry"], "--document_boundary carry"),
        (["--train_shards", "{shards}/a"], "{shards}/a has no manifest.json"),
        (["--tokenizer_name", "{other}"], "another tokenizer than {other}"),
    ],
)
def test_what_does_not_fit_is_refused(run, tmp_path, shards, capsys, word_tokenizer, flags, words):
    word_tokenizer.save_pretrained(tmp_path / "other")
    names = {"shards": shards[1], "other": tmp_path / "other"}
    assert run("a", data=[*shards, *(flag.format(**names) for flag in flags)])[0] == 2
    assert words.format(**names) in capsys.readouterr().err and not (tmp_path / "a").exists()
