"""A run's checkpoints one after another, what is skipped, their numbers over tokens, the archive and the trackers."""

import json
import shutil
import sys
from types import SimpleNamespace

import pytest

from hope_hf.evaluation import main, tracking
from hope_hf.evaluation.checkpoints import find_checkpoints
from hope_hf.evaluation.flags import Arguments


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
    fast = ["--suite", "passkey", "--lengths", 160, "--depths", 1, "--samples_per_length", 1, "--cpu_threads", 1]
    return main([*map(str, ["--model_name_or_path", run, "--device", "cpu", *fast, *flags])])


def reports(folder) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_all_are_evaluated_once_and_drawn_over_tokens(run, tmp_path, capsys):
    output = tmp_path / "eval"
    assert evaluate(run, "--checkpoints", "every:5", "--output_dir", output) == 0
    first = (output / "checkpoint-10" / "results.json").read_bytes()
    assert evaluate(run, "--checkpoints", "all", "--output_dir", output) == 0
    assert "3 checkpoints, 2 of them without a report." in capsys.readouterr().out
    assert (output / "checkpoint-10" / "results.json").read_bytes() == first
    for step, tokens in ((2, 128), (4, 256), (10, 640)):
        model = json.loads((output / f"checkpoint-{step}" / "results.json").read_text())["model"]
        assert (model["step"], model["tokens"]) == (step, tokens)
    rows = json.loads((output / "over_tokens.json").read_text())
    assert [row["tokens"] for row in rows if row["name"] == "loss"] == [128, 256, 640]
    assert (output / "over_tokens_passkey.png").read_bytes().startswith(b"\x89PNG")
    # reports of other flags are not mixed
    assert evaluate(run, "--checkpoints", "all", "--output_dir", output, "--seed", 1) == 2
    assert "--seed" in capsys.readouterr().err


def test_a_pattern_names_checkpoints_and_a_broken_one_leaves_the_others(run, tmp_path, capsys):
    (run / "checkpoint-4" / "config.json").write_text("{")
    assert evaluate(run / "checkpoint-[24]", "--output_dir", tmp_path / "eval") == 1
    error = capsys.readouterr().err
    assert "checkpoint-4" in error and error.count("error: ") == 1
    assert reports(tmp_path / "eval") == ["checkpoint-2"]


def test_what_cannot_be_evaluated(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/z/checkpoint-2").mkdir(parents=True)
    for name, flags, words in (
        ("runs/y/checkpoint-*", {}, "runs/y/checkpoint-\\*"),
        ("runs", {"checkpoints": "all"}, "runs holds no folder"),
        ("runs/x", {"checkpoints": "every:7"}, "every:7 .* 3 checkpoints"),
        ("runs/x", {"checkpoints": "every:0"}, "--checkpoints"),
        ("runs/*/checkpoint-*", {}, "several runs"),
    ):
        with pytest.raises(ValueError, match=words):
            find_checkpoints(Arguments(model_name_or_path=name, **flags))


class Writer:
    """TensorBoard's, which leaves out what older files hold from `purge_step` on."""

    shown = []

    def __init__(self, folder: str, purge_step: int | None):
        Writer.shown = [(name, at) for name, at in Writer.shown if purge_step is None or at < purge_step]

    def add_scalar(self, name: str, value: float, at: int):
        Writer.shown.append((name, at))

    def add_image(self, *image, **layout):
        pass

    def close(self):
        pass


@pytest.fixture
def launches(monkeypatch) -> list[list]:
    """The words of the command (W&B records them) and the rows of every run of W&B; its run, and TensorBoard's."""
    rows = []

    def init(**options):
        rows.append([sys.argv[1:]])
        return SimpleNamespace(log=rows[-1].append, finish=lambda: None, define_metric=lambda *a, **o: None)

    monkeypatch.setattr(Writer, "shown", [])
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init, Image=lambda path: ("picture", path)))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(tracking, "find_spec", lambda name: True)
    return rows


def test_offline_trackers_hold_every_checkpoint_once(run, tmp_path, monkeypatch, launches):
    """Evaluated in two launches into one folder, with a report that is made again."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    output = tmp_path / "eval"
    flags = ["--output_dir", output, "--report_to", "wandb,tensorboard"]
    assert evaluate(run, "--checkpoints", "every:2", *flags) == 0
    shutil.rmtree(output / "checkpoint-4")
    assert evaluate(run, "--checkpoints", "all", *flags) == 0
    tokens = [[row["tokens"] for row in rows] for _, *rows in launches]
    assert tokens == [[128, 256, 640], [128, 640, 256]]
    assert sorted(at for name, at in Writer.shown if name.endswith("/loss")) == [128, 256, 640]
    words, _, _, row = launches[0]
    assert words == [] and row["step"] == 10
    assert row["passkey/Passkey/length 160, depth 1/loss"] > 0
    assert row["needle_passkey"] == ("picture", str(output / "checkpoint-10" / "needle_passkey.png"))


def test_a_tracker_that_fails_is_told_and_the_report_is_kept(run, tmp_path, monkeypatch, capsys, launches):
    def fail(**options):
        raise RuntimeError("no\nlogin")

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=fail))
    assert evaluate(run / "checkpoint-10", "--output_dir", tmp_path / "eval", "--report_to", "wandb") == 1
    assert "error: --report_to wandb failed: no login\n" in capsys.readouterr().err
    assert (tmp_path / "eval" / "results.json").exists()
