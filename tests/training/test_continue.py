"""A run is made longer, begins from another one's checkpoint, and goes on with another rate, batch or schedule."""

import json
import math
import shutil

import pytest
import torch
from accelerate import PartialState
from training_runs import EVERY_FOURTH, HOPE, curve
from transformers import get_scheduler

from hope_hf.common.run_arguments import Arguments
from hope_hf.training import trainer
from hope_hf.training.checkpoints.manifest import read_manifest, remove_leftovers
from hope_hf.training.checkpoints.optimizer import _read_other_period
from hope_hf.training.checkpoints.writer import BestModel
from hope_hf.training.engines.base import Slice
from hope_hf.training.flag_values import parse_stop_after
from hope_hf.training.parsing import parse
from hope_hf.training.process import StopAfter
from hope_hf.training.schedule import Schedule, schedule_of

EACH = ["--checkpointing_steps", "2", "--save_total_limit", "9", "--eval_steps", "0"]


def rates(rows) -> list[float]:
    return curve(rows, "train/learning_rate")


def test_more_steps_continue_a_finished_run_with_a_new_warm_up(run, tmp_path, capsys):
    steps = [*EACH, "--num_warmup_steps", "2"]
    _, first = run("a", *steps, "--max_train_steps", 4)
    capsys.readouterr()
    status, stopped = run("a", *steps, "--max_train_steps", 8, "--stop_after", 2)
    told = capsys.readouterr().out
    assert status == 0 and stopped[-1]["step"] == 6 and "begins again there" in told and "0.005 in 2 steps" in told
    status, rows = run("a", *steps, "--max_train_steps", 8)
    assert status == 0 and curve(rows)[:4] == curve(first) and "begins again" not in capsys.readouterr().out
    assert rates(rows) == pytest.approx([5e-3 * x for x in (0, 0.5, 1, 0.5) * 2])
    assert json.loads((tmp_path / "a/run.json").read_text())["identity"]["max_train_steps"] == 8
    assert run("a", *steps, "--max_train_steps", 3)[0] == 2
    assert "raise --max_train_steps" in capsys.readouterr().err


def test_epochs_end_at_the_same_row_however_often_the_batch_changes(run, capsys):
    epochs = [*EACH, "--num_train_epochs", "0.2", "--per_device_train_batch_size"]
    _, whole = run("whole", *epochs, 4)
    changed = [*epochs, 2, "--resume_from_checkpoint", "latest"]
    run("a", *epochs, 4, "--stop_after", 3)
    capsys.readouterr()
    run("a", *changed, "--stop_after", 2)
    card = capsys.readouterr().out
    status, parts = run("a", *changed)
    assert f"{parts[-1]['tokens']:,} tokens\n" in card
    assert status == 0 and abs(parts[-1]["tokens"] - whole[-1]["tokens"]) < 4 * 32


def test_a_complete_run_whose_checkpoints_are_gone_is_not_begun_again(run, trained, tmp_path, capsys):
    folder = trained("llama").copy(tmp_path / "a")
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    before = (folder / "metrics.jsonl").read_text()
    assert run("a", *EVERY_FOURTH, "--max_train_steps", 9)[0] == 2
    assert "complete run without a checkpoint" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_text() == before


def test_a_changed_file_of_level_optimizers_is_refused(run, tmp_path, capsys):
    file = tmp_path / "levels.json"
    flags = [*EACH, "--level_optimizers", file]
    file.write_text('{"1": {"lr_factor": 2}}')
    assert run("a", *flags, "--max_train_steps", 1, model=HOPE)[0] == 0
    file.write_text('{"1": {"lr_factor": 0.5}}')
    assert run("a", *flags, "--max_train_steps", 4, model=HOPE)[0] == 2
    assert "content of level_optimizers was" in capsys.readouterr().err


def test_a_schedule_of_its_own_length_makes_parts_equal_the_whole(run, trained):
    schedule = [*EACH, "--lr_scheduler_steps", 8]
    run("parts", *schedule, "--max_train_steps", 4)
    _, parts = run("parts", *schedule)
    whole = trained("llama").rows
    assert curve(parts) == curve(whole) and rates(parts) == rates(whole)


def test_a_fork_goes_on_bit_for_bit_in_another_folder(run, trained, tmp_path, capsys):
    whole = trained("llama")
    fork = [*EACH, "--resume_from_checkpoint", whole.folder / "checkpoint-4"]
    status, rows = run("b", *fork, "--stop_after", 2)
    assert status == 0 and rows[-1]["step"] == 6
    # The same command goes on in the fork, and does not begin again from the other run.
    status, rows = run("b", *fork)
    assert status == 0 and curve(rows) == curve(whole.rows)[4:]
    assert "b/checkpoint-6 at step 6." in capsys.readouterr().out
    newest = ["--resume_from_checkpoint", whole.folder, "--max_train_steps", 9]
    assert run("b", *EACH, *newest)[0] == 2
    assert "did not begin from --resume_from_checkpoint" in capsys.readouterr().err
    # A run's folder stands for its newest checkpoint.
    status, rows = run("c", *EACH, *newest)
    assert status == 0 and [row["step"] for row in rows if "train/loss" in row] == [9]
    assert run("d", *newest, "--block_size", 16)[0] == 2
    assert "block_size was 32 and is now 16" in capsys.readouterr().err


def test_rate_batch_and_schedule_change_only_when_asked(run, tmp_path, capsys):
    run("a", *EACH, "--max_train_steps", 4, model=HOPE)
    changed = ["--learning_rate", "1e-3", "--per_device_train_batch_size", "2", "--weight_decay", "0"]
    changed += ["--lr_scheduler_type", "linear", "--max_train_steps", "6", "--num_warmup_steps", "0"]
    assert run("a", *EACH, *changed, model=HOPE)[0] == 2
    assert "--resume_from_checkpoint latest" in capsys.readouterr().err
    source = tmp_path / "a" / "checkpoint-2"
    status, rows = run("b", *EACH, *changed, "--resume_from_checkpoint", source, model=HOPE)
    told = capsys.readouterr().out
    assert status == 0 and "learning_rate was 0.005 and is now 0.001" in told
    assert "rows_per_step was 4 and is now 2" in told and "weight_decay was 0.1" in told and "0.000666" in told
    assert rates(rows) == pytest.approx([1e-3 * (6 - step) / 6 for step in (2, 3, 4, 5)])
    assert curve(rows, "tokens")[:4] == [256 + 64, 256 + 128, 256 + 192, 256 + 256]
    # Two of four calls are four of eight now, and level 0 has just stepped.
    assert curve(rows, "level/0/tokens_since_update") == [64, 128, 192, 0]
    assert curve(rows, "level/1/tokens_since_update") == [320, 384, 448, 0]


@pytest.mark.parametrize("before, now, calls, kept", [(4, 8, 3, 6), (8, 4, 7, 3), (3, 2, 1, 1), (4, 2, 0, 0)])
def test_a_clock_keeps_its_share_of_the_period_and_its_mean_gradient(before, now, calls, kept):
    class Saved:
        @staticmethod
        def read_into(held, scalars):
            scalars["tick"].fill_(calls)
            held.tensors["gradient_sum"].fill_(2.5 * calls)

    held = Slice(("w",), torch.Size([3]), 0, {"gradient_sum": torch.full((3,), 9.0)}, is_copy=False)
    tick = torch.tensor(5)
    _read_other_period(Saved, held, {"tick": tick}, before, now)
    assert tick == kept and held.tensors["gradient_sum"].tolist() == [2.5 * kept] * 3


def test_a_batch_cannot_change_where_rows_continue_each_other(run, tmp_path, capsys):
    carry = [*EACH, "--document_boundary", "carry", "--max_train_steps", 2]
    run("a", *carry, model=HOPE)
    flags = ["--resume_from_checkpoint", tmp_path / "a", "--per_device_train_batch_size", 2, "--max_train_steps", 4]
    assert run("b", *carry, *flags, model=HOPE)[0] == 2
    assert "carries 4 rows from batch to batch and this run 2" in capsys.readouterr().err


def flags(**changes) -> Arguments:
    return Arguments(output_dir="x", **changes)


@pytest.mark.parametrize(
    "kind", ["linear", "cosine", "cosine_with_restarts", "polynomial", "constant_with_warmup", "inverse_sqrt"]
)
def test_the_rates_of_a_run_are_those_of_transformers(kind):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=2e-3)
    (expected,) = get_scheduler(kind, optimizer, num_warmup_steps=5, num_training_steps=50).lr_lambdas
    found = schedule_of(flags(lr_scheduler_type=kind), 50).fractions(2e-3)
    for step in range(51):
        assert found(step) == expected(step), step


def test_a_schedule_that_has_ended_keeps_its_last_rate():
    settings = dict(lr_scheduler_type="cosine_with_min_lr", lr_scheduler_steps=20, num_warmup_steps=0)
    found = schedule_of(flags(**settings), 100).fractions(1.0)
    assert [found(0), found(20), found(30), found(100)] == pytest.approx([1, 0.1, 0.1, 0.1])
    stable = schedule_of(flags(lr_scheduler_type="warmup_stable_decay"), 100)
    assert (stable.warmup, stable.settings) == (10, {"num_decay_steps": 10})
    found = stable.fractions(1.0)
    assert [found(5), found(10), found(90), found(95), found(100)] == pytest.approx([0.5, 1, 1, 0.5, 0])


def test_a_schedule_that_begins_again_rises_from_the_last_rate():
    found = Schedule("linear", warmup=4, end=20, begin=10, first=0.2).fractions(1.0)
    assert [found(step) for step in (10, 12, 14, 17, 20)] == pytest.approx([0.2, 0.6, 1, 0.5, 0])


@pytest.mark.parametrize(
    "kind, settings, words",
    [
        ("cosine", '{"min_lr": 0.1}', "'min_lr' is unknown.*num_cycles"),
        ("constant", '{"a": 1}', "'a' is unknown"),
        ("cosine_with_min_lr", '{"min_lr": 1}', "times its peak"),
        ("warmup_stable_decay", '{"decay_type": "x"}', "decay type: x"),
        ("polynomial", '{"power": "x"}', "polynomial"),
        ("cosine", "[1]", "cannot be read"),
        ("cosine", "{", "cannot be read"),
    ],
)
def test_settings_that_do_not_fit_are_one_sentence(kind, settings, words):
    with pytest.raises(ValueError, match=words):
        schedule_of(flags(lr_scheduler_type=kind, lr_scheduler_kwargs=settings), 100).check(0.01)


def test_a_rate_that_stays_at_zero_is_refused(run, capsys):
    assert run("a", "--lr_scheduler_steps", 4)[0] == 2
    assert "--lr_scheduler_steps 4" in capsys.readouterr().err


@pytest.mark.parametrize("named, limits", [("7", (7, math.inf)), ("1.5h", (math.inf, 5400)), ("90s", (math.inf, 90))])
def test_stop_after_takes_steps_or_time(named, limits):
    assert parse_stop_after(named) == limits
    after = StopAfter(named)
    assert not after.reached(6) and after.reached(7) == (limits[0] == 7)


@pytest.mark.parametrize("named", ["", "0", "0h", "-1", "2 days", "1.5", "h", "nan"])
def test_stop_after_refuses_the_rest(named):
    with pytest.raises(ValueError, match="--stop_after"):
        parse_stop_after(named)


def test_the_model_of_the_best_evaluation_is_kept(run, tmp_path, monkeypatch, capsys):
    losses = iter([6.0, 5.0, 5.5, 5.2, 4.0])
    evaluate = trainer.evaluate
    monkeypatch.setattr(trainer, "evaluate", lambda *options: evaluate(*options) | {"eval/loss": next(losses)})
    flags = ["--eval_steps", 2, "--eval_on_start", "--keep_best", "eval/loss", "--max_train_steps"]
    status, rows = run("a", *flags, 6, "--stop_after", 5)
    assert status == 0 and curve(rows, "eval/loss") == [6.0, 5.0, 5.5]
    best = tmp_path / "a/best"
    manifest = read_manifest(best)
    assert (manifest.step, manifest.facts["value"], manifest.facts["only_model"]) == (2, 5.0, True)
    # A continued run compares with the best of before.
    assert run("a", *flags, 6)[0] == 0
    assert read_manifest(best).step == 2
    assert run("a", *flags, 8)[0] == 0
    assert read_manifest(best).step == 8
    assert (best / "model.safetensors").read_bytes() == (tmp_path / "a" / "model.safetensors").read_bytes()
    assert run("b", "--resume_from_checkpoint", best)[0] == 2
    assert "holds the model alone" in capsys.readouterr().err


def test_higher_accuracy_is_better(tmp_path):
    PartialState(cpu=True)
    best = BestModel(tmp_path, "eval/accuracy")
    rows = [{"eval/accuracy": value} for value in (0.2, 0.1, float("nan"), 0.3)]
    assert [best.beaten_by(row) is not None for row in rows] == [True, False, False, True]
    assert BestModel(tmp_path, "none").beaten_by({"eval/loss": 1.0}) is None


def test_evaluations_and_the_best_model_change_no_step(run, trained):
    _, rows = run("b", "--eval_on_start", "--eval_steps", 1, "--keep_best", "eval/loss")
    assert curve(rows) == curve(trained("llama").rows)


def test_what_is_kept_for_good_stays_under_later_commands(run, tmp_path):
    steps = ["--checkpointing_steps", 1, "--save_total_limit", 1]
    run("a", *steps, "--keep_every", 3, "--max_train_steps", 7)
    run("a", *steps, "--keep_every", 5, "--max_train_steps", 8)
    run("a", *steps, "--max_train_steps", 11)
    kept = {int(path.name.split("-")[1]) for path in (tmp_path / "a").glob("checkpoint-*")}
    assert kept == {3, 6, 9, 10, 11}
    record = json.loads((tmp_path / "a/run.json").read_text())
    assert record["keep_every"] == [3, 5] and len(record["commands"]) == 3
    with pytest.warns(UserWarning, match="--keep_every 3 keeps a checkpoint every 6 steps"):
        parse(["--output_dir", "x", "--keep_every", "3", "--checkpointing_steps", "2"])


def test_a_kill_between_two_names_loses_no_best_model(tmp_path):
    for name in ("best.replaced-ab", "best.replaced-ab.tmp-ab-0123abcd"):
        (tmp_path / name).mkdir()
    remove_leftovers(tmp_path, "ab")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    (tmp_path / "best.replaced-ab").mkdir()
    remove_leftovers(tmp_path, "ab")
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
