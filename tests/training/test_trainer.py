"""What a run writes and reports, and how it handles losses that are not finite."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from training_runs import (
    HOPE,
    HOPE_HYBRID,
    change_losses,
    curve,
    mask_steps,
    no_number,
    parts_of_checkpoint,
    same_tensors,
)
from transformers import LlamaConfig, LlamaForCausalLM

from hope_hf.training import finish, trainer
from hope_hf.training.engines.base import Engine
from hope_hf.training.state import CarriedMemory


def test_metrics_of_every_kind(trained):
    rows = trained("hope").rows
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert curve(rows, "tokens") == [128 * row["step"] for row in rows]
    last, evaluation = rows[-2], rows[-1]
    assert last["train/loss"] < rows[0]["train/loss"] < 1.05 * math.log(300)
    for name in ("grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib"):
        assert last[f"train/{name}"] > 0, name
    assert 0 <= last["train/data_loading_percent"] <= 100
    assert last["train/eta_seconds"] == 0
    for name in ("learning_rate_mean", "retention_mean", "surprise_before", "surprise_after", "state_norm_ratio"):
        assert math.isfinite(last[f"memory/1/{name}"]), name
    for name in ("key_norm", "value_norm", "target_norm", "initial_state_grad_norm"):
        assert last[f"memory/1/{name}"] > 0, name
    # Periods of 256 and 512 tokens are 2 and 4 steps of 128.
    assert curve(rows, "level/1/updates") == [0, 0, 0, 1, 1, 1, 1, 2]
    assert curve(rows, "level/0/tokens_since_update") == [128, 0] * 4
    assert 0 < evaluation["eval/accuracy"] < 1
    assert evaluation["eval/perplexity"] == pytest.approx(math.exp(evaluation["eval/loss"]))


def test_a_run_leaves_a_model_that_loads_and_results(trained):
    hope = trained("hope")
    evaluation = hope.rows[-1]
    # The file that transformers' examples write.
    results = json.loads((hope.folder / "all_results.json").read_text())
    assert results["eval_accuracy"] == evaluation["eval/accuracy"]
    assert results["perplexity"] == evaluation["eval/perplexity"]
    assert (hope.folder / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert (hope.folder / "generation_config.json").exists()
    assert "updated every 4 steps, 2 times in this run" in hope.printed
    # The lines with which it says how to load the model.
    program = hope.printed.partition("Load the model:")[2].strip()
    names = {}
    exec("\n".join(line.strip() for line in program.splitlines()), names)
    assert len(names["tokenizer"]) == names["model"].config.vocab_size


def test_memories_alone_are_trained(run, tmp_path):
    run("a", "--max_train_steps", 1, model=HOPE_HYBRID)
    base = ["--model_name_or_path", str(tmp_path / "a")]
    assert run("b", "--train_only", "memories", "--max_train_steps", 2, model=base)[0] == 0
    before = load_file(tmp_path / "a" / "model.safetensors")
    after = load_file(tmp_path / "b" / "model.safetensors")
    for name, weight in before.items():
        is_trained = name.startswith("model.layers.0.mixer.")
        assert torch.equal(weight, after[name]) is not is_trained, name


def infinite_gradient(loss):
    loss.register_hook(lambda gradient: gradient * math.inf)
    return loss


def test_non_finite_steps_are_skipped_and_counted(run, monkeypatch, capsys, tmp_path):
    """Behind a finite loss, too; what they left is no checkpoint."""
    poisons = {1: infinite_gradient, 2: infinite_gradient, 4: lambda loss: loss * math.nan}
    change_losses(monkeypatch, lambda count, loss: poisons.get(count, lambda own: own)(loss))
    saves = ["--checkpointing_steps", "1", "--save_total_limit", "9"]
    status, rows = run("a", "--max_train_steps", "5", *saves)
    assert status == 0 and curve(rows, "train/skipped_steps") == [1, 2, 2, 3, 3]
    assert [loss is None for loss in curve(rows)] == [True, True, False, True, False]
    assert "step 4 skipped" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "a").glob("checkpoint-*")} == {"checkpoint-3", "checkpoint-5"}
    weights = load_file(tmp_path / "a" / "model.safetensors").values()
    assert all(torch.isfinite(weight).all() for weight in weights)


def test_a_step_without_a_token_to_learn_changes_nothing_and_is_told_once(run, monkeypatch, capsys, tmp_path):
    """Weight decay, momentum and clocks stand still."""
    mask_steps(monkeypatch, 2, 3)
    saves = ["--max_train_steps", 4, "--checkpointing_steps", 1, "--save_total_limit", 9]
    status, rows = run("a", *saves, "--gradient_accumulation_steps", 2, "--weight_decay", 0.5, model=HOPE)
    first, third, fourth = (parts_of_checkpoint(tmp_path / "a", step) for step in (1, 3, 4))
    assert status == 0 and same_tensors(first, third) and not same_tensors(first, fourth)
    assert [loss is None for loss in curve(rows)] == [False, True, True, False]
    assert curve(rows, "train/empty_steps") == [1, 2, 2]
    said = capsys.readouterr().out
    assert said.count("has no token to learn") == 1
    assert "2 of 4 steps had no token to learn" in said
    assert "nan" not in said


def diverge(monkeypatch, what: str):
    """Let a run of 4 steps end with a loss, weights or an evaluation that are not finite."""
    evaluate, update, updates = trainer.evaluate, Engine.update, []

    def updated(engine, *arguments):
        outcome = update(engine, *arguments)
        updates.append(outcome)
        if len(updates) == 4:
            next(engine.model.parameters()).data.fill_(math.inf)
        return outcome

    if what == "loss":
        change_losses(monkeypatch, no_number(4))
    elif what == "weights":
        monkeypatch.setattr(Engine, "update", updated)
    else:
        monkeypatch.setattr(trainer, "evaluate", lambda *given: evaluate(*given) | {"eval/loss": math.nan})


@pytest.mark.parametrize("what, last", [("loss", 2), ("weights", 2), ("evaluation", 4)])
def test_a_run_that_has_diverged_is_no_complete_run(run, monkeypatch, tmp_path, capsys, what, last):
    diverge(monkeypatch, what)
    status, _ = run("a", "--max_train_steps", "4", "--checkpointing_steps", "2")
    error = capsys.readouterr().err
    assert status == 1 and what in error and "lower --learning_rate (now 0.005)" in error
    assert f"{tmp_path / 'a'}/checkpoint-{last}" in error
    assert json.loads((tmp_path / "a" / "run.json").read_text())["complete"] is False
    assert not (tmp_path / "a" / "model.safetensors").exists()
    # JSON has no NaN.
    assert "NaN" not in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_weights_that_are_not_finite_are_refused(run, monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as patch:
        diverge(patch, "weights")
        patch.setattr(trainer, "weights_are_finite", lambda engine: True)
        run("a", "--max_train_steps", "4")
    checkpoint = tmp_path / "a" / "checkpoint-4"
    assert run("a", "--max_train_steps", "4")[0] == 2
    assert f"error: {checkpoint} holds weights that are not finite" in capsys.readouterr().err
    assert run("b", model=["--model_name_or_path", str(checkpoint)])[0] == 2
    assert f"error: --model_name_or_path {checkpoint} holds weights" in capsys.readouterr().err


@pytest.mark.parametrize(
    "first, prompt", [(0, slice(0, 32)), (1, slice(0, 32)), (9, slice(0, 9)), (50, slice(18, 50))]
)
def test_the_sample_goes_on_before_the_first_token_that_is_scored(monkeypatch, first, prompt):
    """In a chat that is the assistant's first answer, and elsewhere the beginning of the text."""
    monkeypatch.setattr(finish, "SAMPLE_TOKENS", 4)
    ids = torch.arange(1, 61)[None]
    labels = ids.masked_fill(torch.arange(60) < first, -100)
    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=0, decode=lambda tokens: tokens.tolist())
    data = SimpleNamespace(validation=[{"input_ids": ids, "labels": labels}], tokenizer=tokenizer)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2))
    assert finish.sample(model, data, seed=0)[0] == ids[0, prompt].tolist()


def test_a_run_is_complete_whatever_happens_to_sample_and_picture(run, monkeypatch, tmp_path):
    def fails(*arguments, **options):
        raise RuntimeError("out of paint")

    monkeypatch.setattr(finish, "sample", fails)
    monkeypatch.setattr(finish, "draw_curves", fails)
    with pytest.warns(UserWarning, match="loss.png .*out of paint"):
        status, _ = run("a", "--max_train_steps", "1")
    assert status == 0 and json.loads((tmp_path / "a" / "run.json").read_text())["complete"] is True


def test_ten_non_finite_steps_in_a_row_stop_the_run_with_its_checkpoint_intact(run, monkeypatch, capsys):
    flags = ("--max_train_steps", "16", "--checkpointing_steps", "2", "--vector_learning_rate", "2e-2")
    with monkeypatch.context() as patch:
        change_losses(patch, no_number(*range(4, 14)))
        status, rows = run("a", *flags)
    error = capsys.readouterr().err
    assert status == 1 and rows[-1]["step"] == 12
    assert "10 steps in a row" in error and "checkpoint-2" in error
    assert re.search(r"--learning_rate \(now \S+\) and --vector_learning_rate \(now 0\.02\)", error)
    status, rows = run("a", *flags)
    assert status == 0 and rows[-1]["step"] == 16


def test_the_first_and_the_last_step_are_logged_and_a_run_of_warm_up_warns(run):
    with pytest.warns(UserWarning, match="the warm-up would end at step 9"):
        _, rows = run("a", "--logging_steps", "3", "--max_train_steps", "5", "--num_warmup_steps", "9")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 3, 5]


def test_accumulated_batches_equal_one_large_batch(run, trained):
    whole = trained("llama").rows
    _, parts = run("parts", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4")
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-5)
    assert curve(parts, "train/grad_norm") == pytest.approx(curve(whole, "train/grad_norm"), rel=1e-4)


def test_carried_memories_change_what_a_row_begins_with(run, monkeypatch):
    # The same rows in the same order: only the memories at a row's beginning differ, from the second on.
    small = ["--document_boundary", "carry", "--max_train_steps", "2", "--learning_rate", "1e-9"]
    _, carried = run("carried", *small, model=HOPE)
    monkeypatch.setattr(CarriedMemory, "hand_over", CarriedMemory.restart)
    _, forgotten = run("forgotten", *small, model=HOPE)
    assert curve(carried)[0] == curve(forgotten)[0] and curve(carried)[1] != curve(forgotten)[1]


@pytest.mark.parametrize(
    "flags, project, name",
    [([], "of_the_environment", "first"), (["--project_name", "mine", "--run_name", "own"], "mine", "own")],
)
def test_trackers_get_project_and_name_and_no_password(run, tmp_path, monkeypatch, flags, project, name):
    """W&B itself reads the command line, in which a hook may have a password."""
    begun = []
    monkeypatch.setattr(
        "accelerate.Accelerator.init_trackers", lambda _, project, **more: begun.append((project, more, [*sys.argv]))
    )
    monkeypatch.setenv("WANDB_PROJECT", "of_the_environment")
    monkeypatch.setenv("WANDB_NAME", "first")
    hook = ["--checkpoint_hook", "true Password1"]
    monkeypatch.setattr(sys, "argv", ["hope-hf", "train", *hook])
    assert run("a", "--report_to", "wandb", "--max_train_steps", "1", *flags, *hook)[0] == 0
    ((found, more, argv),) = begun
    assert found == project and more["init_kwargs"]["wandb"]["name"] == name
    assert argv == ["hope-hf"] and sys.argv[1] == "train" and "Password1" not in repr(more)
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert [path for path in files if b"Password1" in path.read_bytes()] == []
