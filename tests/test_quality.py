"""benchmarks/quality.py: two real runs of a few steps, and its mistakes."""

import pytest

from benchmarks.quality import program, results
from benchmarks.quality.models import SIZES, Size

pytestmark = pytest.mark.benchmarks

MICRO = Size(128, 2, 320, 4, 112, 669_000, 4, 3, (1e-3,), block_size=32, per_device_train_batch_size=2)


@pytest.mark.usefixtures("warm_python")
def test_two_runs_are_trained_recorded_and_not_repeated(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(SIZES, "micro", MICRO)
    (tmp_path / "text").mkdir()
    lines = [f"{number} times {number + 1} are {number * (number + 1)}\n" for number in range(600)]
    (tmp_path / "text/tinyshakespeare.txt").write_text("".join(lines))
    flags = ["--output_dir", str(tmp_path / "out"), "--data_dir", str(tmp_path), "--sizes", "micro"]
    flags += ["--texts", "tinyshakespeare", "--search_text", "tinyshakespeare", "--models", "hope", "llama_conv"]
    results_file = tmp_path / "out/results.jsonl"
    assert program.main([*flags, "--plan"]) == 0
    assert "2 runs can start" in capsys.readouterr().out
    assert not results_file.exists()
    assert program.main(flags) == 0
    shown = capsys.readouterr().out
    rows = results.load(results_file)
    assert sorted(row["model"] for row in rows) == ["hope", "llama_conv"]
    for row in rows:
        assert 4 < row["eval_loss"] < 7 and f"{row['eval_loss']:.4f} |" in shown
        assert (row["steps"], row["tokens"], row["threads"], row["seed"]) == (3, 3 * 64, 1, 1)
        assert row["commit"] and row["versions"]["torch"] and row["parameters"] > 1e5
    assert program.main(flags) == 0 and len(results.load(results_file)) == 2
    # a program that fails with a sentence, as run_clm.py does
    failing = tmp_path / "failing.py"
    failing.write_text("import sys\nprint('error: no training today')\nsys.exit(2)\n")
    monkeypatch.setattr("benchmarks.quality.runs.PROGRAM", failing)
    assert program.main([*flags, "--vector_learning_rates", "0.03"]) == 1
    assert "error: no training today" in capsys.readouterr().out
    assert len(results.load(results_file)) == 2


def test_mistakes_are_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("HOPE_TEST_DATA", raising=False)
    for flags, named in (
        ("--texts moby_dick", "--data_dir"),
        ("--parallel 0", "--parallel is 0"),
        ("--seeds 2", "--learning_rates"),
    ):
        assert program.main(["--output_dir", str(tmp_path), *flags.split()]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and named in error and error.count("\n") == 1
