"""A stopped run continues as if it had not stopped: bit for bit on one process."""

import contextlib
import json
import signal

import pytest
import torch
from training_runs import EVERY_FOURTH, HOPE, LLAMA, change_losses, curve, forget_the_end
from transformers import get_scheduler

from hope_hf import PRESETS
from hope_hf.training import trainer
from hope_hf.training.checkpoints.manifest import Manifest
from hope_hf.training.checkpoints.reader import SavedRun
from hope_hf.training.process import QUIT, StopSignal
from hope_hf.training.schedule import Schedule
from hope_hf.training.state import CarriedMemory, LoopState

SAVES = ["--checkpointing_steps", "2", "--eval_steps", "3", "--max_train_steps", "5"]


@pytest.mark.parametrize(
    "model, flags",
    [
        (LLAMA, ["--gradient_accumulation_steps", "2", "--optimizer", "muon", "--logging_steps", "3"]),
        (HOPE, ["--eval_on_start"]),
        (HOPE, ["--document_boundary", "carry"]),
    ],
    ids=["llama-muon", "hope", "hope-carry"],
)
def test_continued_run_equals_the_uninterrupted_one(run, tmp_path, monkeypatch, model, flags):
    flags = [*SAVES, "--save_total_limit", "9", *flags]
    status, whole = run("a", *flags, model=model)
    forget_the_end(tmp_path / "a", 4, 5)
    # A run keeps its model when its preset changes.
    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"] | {"conv_kernel_size": 3, "memory_value_gate": False})
    status, continued = run("a", *flags, model=model)
    assert status == 0 and len(curve(whole)) in (3, 5)
    for name in ("train/loss", "train/grad_norm", "eval/loss", "step"):
        assert curve(continued, name) == curve(whole, name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_signal_saves_at_the_step_boundary_and_the_same_command_continues(
    run, trained, tmp_path, monkeypatch, capsys, request, number
):
    # Under nohup SIGHUP is ignored, and stays so.
    before = signal.signal(number, signal.SIG_DFL)
    request.addfinalizer(lambda: signal.signal(number, before))

    def interrupted(count, loss):
        if count == 6:
            signal.raise_signal(number)
        return loss

    with monkeypatch.context() as patch:
        change_losses(patch, interrupted)
        status, rows = run("a")
    assert status == 0 and rows[-1]["step"] == 6
    assert [path.name for path in (tmp_path / "a").glob("checkpoint-*")] == ["checkpoint-6"]
    assert "run the same command again" in capsys.readouterr().out
    assert not (tmp_path / "a" / "model.safetensors").exists()
    status, rows = run("a")
    whole = trained("llama").rows
    assert status == 0 and curve(rows) == curve(whole)
    assert curve(rows, "eval/loss") == curve(whole, "eval/loss")[-1:]


def test_complete_run_is_not_repeated(run, trained, tmp_path, capsys):
    folder = trained("llama").copy(tmp_path / "a")
    before = (folder / "model.safetensors").stat().st_mtime_ns
    # Of a process that was killed while it deleted a checkpoint.
    mark = json.loads((folder / "run.json").read_text())["run_id"]
    (folder / f"checkpoint-6.tmp-{mark}-0123abcd").mkdir()
    assert run("a", *EVERY_FOURTH)[0] == 0 and "is complete" in capsys.readouterr().out
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8"}
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_named_checkpoint_is_taken_if_it_is_the_newest_and_later_rows_are_replaced(run, trained, tmp_path, capsys):
    folder = trained("llama").copy(tmp_path / "a")
    named = [*EVERY_FOURTH, "--resume_from_checkpoint", folder / "checkpoint-4"]
    forget_the_end(folder)
    assert run("a", *named)[0] == 2 and "gone on to checkpoint-8" in capsys.readouterr().err
    forget_the_end(folder, 8)
    run("a", *named, "--stop_after", 1)
    assert "give --resume_from_checkpoint latest to continue" in capsys.readouterr().out
    _, rows = run("a", *EVERY_FOURTH, "--resume_from_checkpoint", "latest")
    assert curve(rows) == curve(trained("llama").rows)


@pytest.mark.parametrize("fails", [True, False])
def test_after_an_error_in_the_loop_sigterm_waits_until_it_is_told(fails):
    """A launcher that has lost one process sends SIGTERM to the others, which already have the reason."""
    stop = StopSignal()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with contextlib.suppress(RuntimeError), stop:
        if fails:
            raise RuntimeError
    try:
        assert signal.getsignal(signal.SIGTERM) == (stop._receive if fails else before[signal.SIGTERM])
        assert signal.getsignal(signal.SIGINT) == before[signal.SIGINT]
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


def test_ctrl_c_is_answered_at_once_and_a_second_one_ends_the_process(monkeypatch, capfd):
    ends = []
    monkeypatch.setattr("os._exit", ends.append)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received and ends == []
        assert capfd.readouterr().err == "\nStopping after this step; press Ctrl-C again to quit now.\n"
        signal.raise_signal(signal.SIGTERM)
        assert ends == []
        signal.raise_signal(signal.SIGINT)
    assert ends == [130]
    assert "error: stopped by Ctrl-C; the same command goes on" in capfd.readouterr().err


def test_under_nohup_a_closed_terminal_stops_nothing():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopSignal() as stop:
        signal.raise_signal(signal.SIGHUP)
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN and not stop.received


def test_ctrl_c_before_the_steps_is_one_sentence(run, monkeypatch, capsys):
    monkeypatch.setattr(trainer, "build_all", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    assert run("a")[0] == 130
    assert capsys.readouterr().err.endswith(f"error: {QUIT}\n")


def new_state() -> LoopState:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=1, num_training_steps=4)
    return LoopState({}, Schedule("cosine", 1, 4), scheduler, CarriedMemory(None), None)


def saved_state(folder) -> SavedRun:
    """That of a checkpoint after step 2."""
    state = new_state()
    for _ in range(2):
        state.scheduler.optimizer.step()
        state.scheduler.step()
        state.counters.step += 1
    return SavedRun(Manifest(folder, 2, {}, {}), state.state_dict())


@pytest.mark.parametrize(
    "file, name, value",
    [
        ("scheduler", "base_lrs", [1e30]),
        ("scheduler", "last_epoch", 3),
        ("scheduler", "_last_lr", [float("nan")]),
        ("trainer", "progress", {"step": 2, "tokens": -1}),
        ("trainer", "progress", {"step": 2, "loss_sum": float("nan")}),
        ("rank", "carried", {"memory": torch.tensor([float("inf")])}),
        ("rank", "rng", {}),
    ],
)
def test_a_state_that_no_run_writes_is_refused(tmp_path, file, name, value):
    saved, state = saved_state(tmp_path), new_state()
    state.scheduler.optimizer.param_groups[0]["lr"] = saved.state["scheduler"]["_last_lr"][0]
    saved.state[file][name] = value
    with pytest.raises(ValueError, match=rf"{tmp_path}/{file}\S* is no state of this run .*: resume from another"):
        state.load(saved, torch.device("cpu"))
