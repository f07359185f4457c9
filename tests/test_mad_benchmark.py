"""benchmarks/mad.py: its models have one size, and finished trainings are not repeated."""

import json

import pytest

from benchmarks import mad
from benchmarks.synthetic.measure import known_tasks
from benchmarks.synthetic.model import small_model

pytestmark = pytest.mark.benchmarks


def test_models_are_of_one_size_and_tasks_are_known():
    sizes = {}
    for name in mad.MODELS:
        sizes[name] = small_model(mad.Job("mad-recall", name, 3e-3, 1).architecture, 16, 0).num_parameters()
    assert sizes == pytest.approx(dict.fromkeys(sizes, sizes["hope"]), rel=0.02)
    assert set(mad.TASKS) <= set(known_tasks())


def test_a_training_gives_a_row_that_is_reported_and_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(mad.TASKS, "mad-memorisation", (2, 2))
    row = mad.measure(mad.Job("mad-memorisation", "llama", 3e-3, 1))
    assert len(row["accuracy"]) == 1 and 0 <= row["accuracy"][0] <= 1
    assert (row["steps"], row["n"]) == (2, 256)
    results = tmp_path / "mad.jsonl"
    results.write_text(json.dumps(row | {"accuracy": [0.125]}) + "\n")
    before = results.read_text()
    flags = ["--tasks", "mad-memorisation", "--models", "llama", "--learning_rates", "3e-3", "--parallel", "1"]
    assert mad.main([*flags, "--results", str(results)]) == 0
    assert results.read_text() == before
    shown = capsys.readouterr().out
    assert "| llama | 12.5 (0.003) |" in shown and "| hope | missing |" in shown


def test_mistakes_are_one_sentence(tmp_path, capsys):
    for flags, words in (
        (["--parallel", "0"], "--parallel"),
        (["--learning_rates", "2"], "--learning_rates"),
        (["--report", "--results", str(tmp_path)], "--results"),
    ):
        assert mad.main(flags) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
