"""A run's checkpoints one after another, what is skipped, their numbers over tokens, the archive and the trackers."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hope_hf.evaluation import main, tracking
from hope_hf.evaluation.checkpoints import as_checkpoint, find_checkpoints, parse_checkpoints
from hope_hf.evaluation.flags import FLAGS, Arguments
from hope_hf.evaluation.report import archive
from hope_hf.evaluation.result import Key, Number, numbers
from hope_hf.evaluation.saved_reports import find_report
from hope_hf.evaluation.suites import SUITES

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(folders, tmp_path):
    """A run with three checkpoints, one of the model alone, and one that is still written."""
    run = tmp_path / "runs" / "x"
    for step in (2, 4, 10):
        shutil.copytree(folders["llama"], run / f"checkpoint-{step}")
        if step != 4:
            (run / f"checkpoint-{step}" / "trainer.json").write_text(json.dumps({"progress": {"tokens": 64 * step}}))
    (run / "checkpoint-12.tmp-1234").mkdir()
    (run / "metrics.jsonl").write_text('{"step": 2, "tokens": 128}\n{"step": 4, "tokens": 256}\n{"st')
    return run


def evaluate(run, *flags) -> int:
    fast = ["--suite", "passkey", "--lengths", 160, "--depths", 1, "--samples_per_length", 2, "--cpu_threads", 1]
    return main([*map(str, ["--model_name_or_path", run, "--device", "cpu", *fast, *flags])])


def test_all_are_evaluated_once_and_drawn_over_tokens(run, tmp_path, capsys):
    output = tmp_path / "eval"
    assert evaluate(run, "--checkpoints", "every:5", "--output_dir", output) == 0
    assert "1 checkpoints, 1 of them without a report." in capsys.readouterr().out
    first = (output / "checkpoint-10" / "results.json").read_bytes()
    assert evaluate(run, "--checkpoints", "all", "--output_dir", output) == 0
    shown = capsys.readouterr().out
    assert "3 checkpoints, 2 of them without a report." in shown and "checkpoint-10\n" not in shown
    assert (output / "checkpoint-10" / "results.json").read_bytes() == first
    models = [json.loads((output / f"checkpoint-{n}" / "results.json").read_text())["model"] for n in (2, 4, 10)]
    assert [(model["step"], model["tokens"]) for model in models] == [(2, 128), (4, 256), (10, 640)]
    rows = json.loads((output / "over_tokens.json").read_text())
    assert [row["tokens"] for row in rows if row["name"] == "loss"] == [128, 256, 640]
    assert (output / "over_tokens_passkey.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_numbers_are_written(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match="matplotlib is not installed"):
        assert evaluate(run, "--checkpoints", "every:5", "--output_dir", tmp_path / "eval") == 0
    assert sorted(path.name for path in (tmp_path / "eval").iterdir()) == ["checkpoint-10", "over_tokens.json"]


def test_a_pattern_names_checkpoints_too(run, tmp_path):
    assert evaluate(run / "checkpoint-[24]", "--output_dir", tmp_path / "eval") == 0
    assert sorted(path.name for path in (tmp_path / "eval").glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_reports_of_other_flags_are_not_mixed(run, tmp_path, capsys):
    output = tmp_path / "eval"
    assert evaluate(run, "--checkpoints", "every:10", "--output_dir", output) == 0
    assert evaluate(run, "--checkpoints", "all", "--output_dir", output, "--seed", 1) == 2
    assert "holds a report of checkpoint-10 with another --seed: name another folder." in capsys.readouterr().err
    assert not (output / "checkpoint-2").exists()


def test_a_suite_that_failed_is_tried_again(run, tmp_path, capsys, monkeypatch):
    output, whole = tmp_path / "eval", SUITES["passkey"]
    words = [run, "--checkpoints", "every:10", "--output_dir", output, "--suite", "sample,passkey"]

    def fails(*_):
        raise ValueError("--lengths: no.")

    monkeypatch.setitem(SUITES, "passkey", replace(whole, measure=fails))
    assert evaluate(*words) == 2
    monkeypatch.setitem(SUITES, "passkey", whole)
    assert evaluate(*words) == 0 and evaluate(*words) == 0
    told = capsys.readouterr().out
    assert told.count("1 checkpoints, 1 of them without a report") == 2 and "sample are taken from it" in told


def test_a_broken_checkpoint_leaves_the_others(run, tmp_path, capsys):
    (run / "checkpoint-4" / "config.json").write_text("{")
    assert evaluate(run, "--checkpoints", "all", "--output_dir", tmp_path / "eval") == 1
    error = capsys.readouterr().err
    assert "checkpoint-4 cannot be loaded" in error and error.count("error: ") == 1
    assert sorted(path.name for path in (tmp_path / "eval").glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-2"]


@pytest.mark.parametrize(
    ("name", "flags", "sentence"),
    [
        ("runs/y/checkpoint-*", [], "runs/y/checkpoint-* matches no folder checkpoint-<step>"),
        ("runs", ["--checkpoints", "all"], "runs holds no folder checkpoint-<step>"),
        ("runs/x", ["--checkpoints", "every:7"], "every:7 leaves none of 3 checkpoints (steps 2 to 10)"),
        ("runs/x", ["--checkpoints", "some"], "--checkpoints 'some' is neither all nor every:N"),
        ("runs/x", ["--checkpoints", "every:0"], "--checkpoints 'every:0' is neither all nor every:N"),
        ("runs/*/checkpoint-*", [], "matches checkpoints of several runs"),
        ("runs/x", ["--report_to", "aim"], "--report_to aim is none of wandb, tensorboard"),
    ],
)
def test_what_cannot_be_evaluated(run, tmp_path, monkeypatch, name, flags, sentence, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run / "checkpoint-2", tmp_path / "runs/z/checkpoint-2")
    assert evaluate(name, *flags, "--output_dir", "eval") == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (tmp_path / "eval").exists()


def test_checkpoints_and_trackers_need_their_folders(run, capsys):
    assert evaluate(run, "--checkpoints", "all") == 2
    assert "name it with --output_dir" in capsys.readouterr().err
    assert evaluate(run / "checkpoint-2", "--report_to", "wandb") == 2
    assert "--report_to needs a folder" in capsys.readouterr().err
    assert main(["--checkpoints", "all", "--output_dir", "x"]) == 2
    assert "--checkpoints needs a run" in capsys.readouterr().err


def test_a_folder_with_brackets_in_its_name_is_no_pattern(tmp_path):
    folder = tmp_path / "run [1]"
    (folder / "checkpoint-3").mkdir(parents=True)
    assert find_checkpoints(Arguments(model_name_or_path=str(folder))) == []
    (found,) = find_checkpoints(Arguments(model_name_or_path=str(folder), checkpoints="all"))
    assert (found.step, found.tokens) == (3, None)
    assert as_checkpoint("owner/name").step is None and parse_checkpoints("every:1000") == 1000


def test_archived_reports_are_kept(run, tmp_path):
    for _ in range(2):
        assert evaluate(run / "checkpoint-2", "--archive_dir", tmp_path / "kept") == 0
    assert len(list((tmp_path / "kept" / "x").glob("2*Z*.json"))) == 2
    for text in ("a", "b", "c"):
        archive(text, tmp_path / "fast")
    assert sorted(path.read_text() for path in (tmp_path / "fast").iterdir()) == ["a", "b", "c"]
    (tmp_path / "file").write_text("")
    assert evaluate(run / "checkpoint-2", "--archive_dir", tmp_path / "file") == 2


def test_rows_of_other_models_are_those_of_the_same_numbers():
    def of(**own):
        return numbers({"own": {"tables": {"Recall": [{"task": "mqar-4", "accuracy": 0.5} | own]}}})

    assert of(model="hope", best_step="10").keys() == of(model="llama", best_step="20").keys()


def test_the_newest_archived_report_is_found(tmp_path):
    for name in ("2026-11-28T01-02-03Z-2", "2026-11-28T01-02-03Z", "2026-11-28T01-02-03Z-10"):
        (tmp_path / f"{name}.json").write_text("")
    assert find_report(str(tmp_path), "--compare").stem.endswith("Z-10")


def test_numbers_of_a_report():
    rows = [{"length": 256, "depth": 0.5, "n": 4, "loss": 1.5, "loss_stderr": 0.1, "exact": 0}]
    harness = [{"task": "piqa", "version": "1", "num_fewshot": 0, "metric": "acc", "value": 0.5, "value_stderr": None}]
    found = numbers({"passkey": {"tables": {"Passkey": rows}}, "zero_shot": {"tables": {"lm-eval": harness}}})
    assert found == {
        Key("passkey", "Passkey", "length 256, depth 0.5", "loss"): Number(1.5, 0.1),
        Key("passkey", "Passkey", "length 256, depth 0.5", "exact"): Number(0.0, None),
        Key("zero_shot", "lm-eval", "piqa, num_fewshot 0", "acc"): Number(0.5, None),
    }


def test_trackers_get_the_numbers_and_pictures(run, tmp_path, monkeypatch):
    sent = []
    fake = SimpleNamespace(
        # W&B records the words of the command.
        init=lambda **options: sent.append([*sys.argv[1:]]) or SimpleNamespace(
            log=sent.append, finish=lambda: sent.append("end"), define_metric=lambda *a, **o: None
        ),
        Image=lambda path: ("picture", path),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    assert evaluate(run / "checkpoint-10", "--output_dir", tmp_path / "eval", "--report_to", "wandb") == 0
    words, row, end = sent
    assert not words and end == "end" and (row["step"], row["tokens"]) == (10, 640)
    assert row["passkey/Passkey/length 160, depth 1/loss"] > 0
    assert row["needle_passkey"] == ("picture", str(tmp_path / "eval" / "needle_passkey.png"))


def test_offline_trackers_hold_every_checkpoint_once(run, tmp_path, monkeypatch):
    """Evaluated in three launches into one folder, with a report that is made again."""
    rows, shown = [], []

    class Writer:
        """TensorBoard leaves out what older files hold from `purge_step` on."""

        def __init__(self, folder: str, purge_step: int | None):
            assert folder == str(output / "tensorboard")
            shown[:] = [(name, at) for name, at in shown if purge_step is None or at < purge_step]

        def add_scalar(self, name: str, value: float, at: int):
            shown.append((name, at))

        def add_image(self, *image, **layout):
            pass

        def close(self):
            pass

    def init(**options):
        rows.append([])
        return SimpleNamespace(log=rows[-1].append, finish=lambda: None, define_metric=lambda *a, **o: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Image=str))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    monkeypatch.setenv("WANDB_MODE", "offline")
    output = tmp_path / "eval"
    flags = ["--output_dir", output, "--report_to", "wandb,tensorboard"]
    assert evaluate(run, "--checkpoints", "every:5", *flags) == 0
    assert evaluate(run, "--checkpoints", "every:2", *flags) == 0
    shutil.rmtree(output / "checkpoint-4")
    assert evaluate(run, "--checkpoints", "all", *flags) == 0
    assert [[row["tokens"] for row in launch] for launch in rows] == [[640], [640, 128, 256], [128, 640, 256]]
    assert sorted(at for name, at in shown if name.endswith("/loss")) == [128, 256, 640]


def test_a_tracker_that_fails_is_told_and_the_report_is_kept(run, tmp_path, monkeypatch, capsys):
    def fail(**options):
        raise RuntimeError("no\nlogin")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fail))
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    assert evaluate(run / "checkpoint-10", "--output_dir", tmp_path / "eval", "--report_to", "wandb") == 1
    assert "error: --report_to wandb failed: no login\n" in capsys.readouterr().err
    assert (tmp_path / "eval" / "results.json").exists()
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"not installed \(pip install tensorboard\)"):
        tracking.tracker_names("tensorboard")


def shape(record: dict) -> dict:
    """The keys of a report, with the columns of every table."""
    tables = {suite: [list(rows[0]) for rows in one["tables"].values()] for suite, one in record["results"].items()}
    return {"report": set(record), "model": set(record["model"]), "tables": tables}


def test_the_example_has_the_keys_of_a_report(folders, text_file, tmp_path):
    example = json.loads((ROOT / "docs/examples/results.json").read_text())
    flags = ["--suite", ",".join(example["results"]), "--lengths", "160", "--validation_file", text_file]
    flags += ["--depths", "1", "--samples_per_length", "2", "--max_new_tokens", "1", "--cpu_threads", "1"]
    assert main(["--model_name_or_path", folders["hope"], *flags, "--output_dir", str(tmp_path / "eval")]) == 0
    written = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert shape(example) == shape(written)
    # Flags may be added, and none of the example's is gone.
    assert set(example["config"]) <= set(FLAGS)
