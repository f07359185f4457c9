"""What a run writes and reports, and how it handles losses that are not finite."""

import json
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import load_file
from training_runs import HOPE, HOPE_HYBRID, LLAMA, curve, mask_steps, parts_of_checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hope_hf.training import finish, trainer
from hope_hf.training.engines.base import Engine
from hope_hf.training.state import CarriedMemory


def test_run_leaves_a_model_that_loads_and_metrics_of_every_kind(run, tmp_path, capsys):
    status, rows = run("a", "--eval_steps", "4", model=HOPE)
    folder, out = tmp_path / "a", capsys.readouterr().out
    assert status == 0
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    assert [row["tokens"] for row in rows if "train/loss" in row] == [128 * step for step in range(1, 9)]
    train, evaluation = rows[-2], rows[-1]
    assert train["train/loss"] < rows[0]["train/loss"] < 1.05 * math.log(300)
    for name in ("grad_norm", "learning_rate", "tokens_per_second", "peak_memory_gib"):
        assert train[f"train/{name}"] > 0
    assert 0 <= train["train/data_loading_percent"] <= 100 and train["train/eta_seconds"] == 0
    for layer in (0, 1):
        for name in ("learning_rate_mean", "retention_mean", "surprise_before", "surprise_after", "state_norm_ratio"):
            assert math.isfinite(train[f"memory/{layer}/{name}"])
        for name in ("key_norm", "value_norm", "target_norm", "initial_state_grad_norm"):
            assert train[f"memory/{layer}/{name}"] > 0
    # Periods of 256 and 512 tokens are 2 and 4 steps of 128.
    assert [row["level/1/updates"] for row in rows if "level/1/updates" in row] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert [row["level/0/tokens_since_update"] for row in rows if "train/loss" in row] == [128, 0] * 4
    assert 0 < evaluation["eval/accuracy"] < 1
    assert json.loads((folder / "all_results.json").read_text())["eval_accuracy"] == evaluation["eval/accuracy"]
    assert evaluation["eval/perplexity"] == pytest.approx(math.exp(evaluation["eval/loss"]))
    assert evaluation["eval/bits_per_byte"] > 0
    # The file that transformers' examples write.
    assert json.loads((folder / "all_results.json").read_text())["perplexity"] == evaluation["eval/perplexity"]
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG" and (folder / "generation_config.json").exists()
    assert "level 1" in out and "updated every 4 steps, 2 times in this run" in out

    lines = out.partition("Load the model:")[2].strip().splitlines()
    assert len(lines) == 3
    loaded = {}
    exec("\n".join(lines), loaded)
    assert len(loaded["tokenizer"]) == loaded["model"].config.vocab_size


def test_evaluation_is_the_mean_over_tokens_and_the_bytes_they_stand_for(run, tmp_path, corpus):
    _, rows = run("a")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    texts = [json.loads(line)["text"] for line in open(corpus[3], encoding="utf-8")]
    bytes_per_token = sum(len(text.encode()) for text in texts) / sum(len(tokenizer(text).input_ids) for text in texts)
    # The cuts of documents change the value by a few percent; a missing ln 2 or factor would change it far more.
    estimate = rows[-1]["eval/loss"] / math.log(2) / bytes_per_token
    assert rows[-1]["eval/bits_per_byte"] == pytest.approx(estimate, rel=0.1)
    assert model.num_parameters() > 0


def test_memories_alone_are_trained(run, tmp_path):
    _, first = run("a", model=HOPE_HYBRID)
    status, rows = run("b", "--train_only", "memories", model=["--model_name_or_path", str(tmp_path / "a")])
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if name.startswith("model.layers.0.mixer.")}
    assert status == 0 and rows[-1]["eval/loss"] < first[-1]["eval/loss"]


def test_non_finite_steps_are_skipped_and_counted(run, monkeypatch, capsys):
    calls = []

    def loss(*arguments):
        calls.append(1)
        return trainer_loss(*arguments) * (math.nan if len(calls) in (3, 5) else 1.0)

    trainer_loss = trainer.summed_loss
    monkeypatch.setattr(trainer, "summed_loss", loss)
    status, rows = run("a", "--checkpointing_steps", "3", "--save_total_limit", "9")
    train = [row for row in rows if "train/loss" in row]
    assert status == 0
    assert [row["train/skipped_steps"] for row in train] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [row["train/loss"] is None for row in train] == [False, False, True, False, True, False, False, False]
    assert "step 3 skipped" in capsys.readouterr().out


def test_a_step_without_a_token_to_learn_changes_nothing_and_is_told_once(run, monkeypatch, capsys, tmp_path):
    """Weight decay, momentum and clocks stand still."""
    mask_steps(monkeypatch, 2, 3)
    saves = ["--max_train_steps", 4, "--checkpointing_steps", 1, "--save_total_limit", 9]
    status, rows = run("a", *saves, "--gradient_accumulation_steps", 2, "--weight_decay", 0.5, model=HOPE)
    first, third, fourth = (parts_of_checkpoint(tmp_path / "a", step) for step in (1, 3, 4))
    assert status == 0 and all(torch.equal(first[name], third[name]) for name in first)
    assert any(not torch.equal(first[name], fourth[name]) for name in first)
    train = [row for row in rows if "train/loss" in row]
    assert [row["train/loss"] is None for row in train] == [False, True, True, False]
    assert [row.get("train/empty_steps") for row in train] == [None, 1, 2, 2]
    said = capsys.readouterr().out
    assert said.count("has no token to learn") == 1 and "2 of 4 steps had no token to learn" in said
    assert "nan" not in said


def test_a_held_out_text_without_a_token_to_score_is_one_sentence():
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.int64), "labels": torch.full((1, 4), -100)}
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    with pytest.raises(ValueError, match="no token to score.*--validation_file"):
        trainer.evaluate(model, SimpleNamespace(validation=[batch]), Accelerator(cpu=True))


def test_infinite_gradient_behind_a_finite_loss_leaves_the_weights_alone(run, monkeypatch, tmp_path):
    calls = []

    def finite_loss(*arguments):
        calls.append(1)
        loss = trainer_loss(*arguments)
        if len(calls) < 5:
            loss.register_hook(lambda gradient: gradient * math.inf)
        return loss

    trainer_loss = trainer.summed_loss
    monkeypatch.setattr(trainer, "summed_loss", finite_loss)
    status, rows = run("a", "--max_train_steps", "5", "--learning_rate", "1", "--checkpointing_steps", "1")
    assert status == 0 and curve(rows, "train/skipped_steps") == [1, 2, 3, 4, 4]
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "a").state_dict()
    assert all(torch.isfinite(weight).all() for weight in weights.values())
    assert [path.name for path in (tmp_path / "a").glob("checkpoint-*")] == ["checkpoint-5"]


def diverge(monkeypatch, what: str):
    """Let a run of 4 steps end with a loss, weights or an evaluation that are not finite."""
    calls, summed_loss, evaluate, update = [], trainer.summed_loss, trainer.evaluate, Engine.update

    def lossy(*arguments):
        calls.append(1)
        return summed_loss(*arguments) * (math.nan if what == "loss" and len(calls) == 4 else 1)

    def updated(engine, *arguments):
        outcome = update(engine, *arguments)
        if what == "weights" and len(calls) == 4:
            next(engine.model.parameters()).data.fill_(math.inf)
        return outcome

    def evaluated(*arguments):
        return evaluate(*arguments) | ({"eval/loss": math.nan} if what == "evaluation" else {})

    monkeypatch.setattr(trainer, "summed_loss", lossy)
    monkeypatch.setattr(trainer, "evaluate", evaluated)
    monkeypatch.setattr(Engine, "update", updated)


@pytest.mark.parametrize(
    "what, sentence, last",
    [
        ("loss", "The loss or gradient of the last step, 4, was not finite", 2),
        ("weights", "The weights are not finite after step 4", 2),
        ("evaluation", "The loss of the evaluation after step 4 is not finite", 4),
    ],
)
def test_a_run_that_has_diverged_is_no_complete_run(run, monkeypatch, tmp_path, capsys, what, sentence, last):
    diverge(monkeypatch, what)
    status, rows = run("a", "--max_train_steps", "4", "--checkpointing_steps", "2")
    error = capsys.readouterr().err
    assert status == 1 and f"{sentence}: lower --learning_rate (now 0.005) or raise --num_warmup_steps" in error
    assert f"last good checkpoint: {tmp_path / 'a'}/checkpoint-{last}." in error
    assert json.loads((tmp_path / "a" / "run.json").read_text())["complete"] is False
    assert not (tmp_path / "a" / "model.safetensors").exists()
    # JSON has no NaN.
    assert "NaN" not in (tmp_path / "a" / "metrics.jsonl").read_text()


def test_weights_that_are_not_finite_are_refused(run, monkeypatch, tmp_path, capsys):
    with monkeypatch.context() as patch:
        diverge(patch, "weights")
        patch.setattr(trainer, "weights_are_finite", lambda engine: True)
        run("a", "--max_train_steps", "4")
    assert run("a", "--max_train_steps", "4")[0] == 2
    checkpoint = tmp_path / "a" / "checkpoint-4"
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


def test_a_run_is_complete_whatever_happens_to_sample_and_picture(run, monkeypatch, tmp_path, capsys):
    def fails(*arguments, **options):
        raise RuntimeError("out of paint")

    monkeypatch.setattr(finish, "sample", fails)
    monkeypatch.setattr(finish, "draw_curves", fails)
    with pytest.warns(UserWarning) as caught:
        status, _ = run("a", "--max_train_steps", "2")
    said = [str(warning.message) for warning in caught]
    assert "No sample of the model: out of paint." in said
    assert f"{tmp_path / 'a'}/loss.png could not be drawn (out of paint)." in said
    assert status == 0 and json.loads((tmp_path / "a" / "run.json").read_text())["complete"] is True
    assert "Load the model:" in capsys.readouterr().out


def test_ten_non_finite_steps_in_a_row_stop_the_run_with_its_checkpoint_intact(run, monkeypatch, tmp_path, capsys):
    calls = []

    def loss(*arguments):
        calls.append(1)
        return trainer_loss(*arguments) * (math.nan if len(calls) > 3 else 1.0)

    flags = ("--max_train_steps", "30", "--checkpointing_steps", "2", "--vector_learning_rate", "2e-2")
    trainer_loss = trainer.summed_loss
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "summed_loss", loss)
        status, _ = run("a", *flags)
    error = capsys.readouterr().err
    assert status == 1
    assert "not finite in 10 steps in a row" in error and "checkpoint-2" in error
    assert re.search(r"lower --learning_rate \(now \S+\) and --vector_learning_rate \(now 0\.02\) or", error)
    assert len(calls) == 13
    status, rows = run("a", *flags)
    assert status == 0 and rows[-1]["step"] == 30


def test_recipe_stands_first_and_flags_override_it(run, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"model_type": "llama", "config_overrides": LLAMA[3], "weight_decay": 0.3}))
    status, rows = run("a", "--max_train_steps", "2", model=[str(recipe)])
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert status == 0 and rows[-1]["step"] == 2
    assert (record["identity"]["weight_decay"], record["identity"]["max_train_steps"]) == (0.3, 2)


def test_a_run_that_ends_within_its_warm_up_warns(run, capsys):
    with pytest.warns(UserWarning, match="the warm-up has 5 steps, and schedule or run end at step 2"):
        run("short", "--num_warmup_steps", 5, "--max_train_steps", 2)
    assert "2, all of them warm-up; 256 tokens" in capsys.readouterr().out


def test_the_first_and_the_last_step_are_logged(run):
    _, rows = run("a", "--logging_steps", "3", "--max_train_steps", "5")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 3, 5]


def test_accumulated_batches_equal_one_large_batch(run):
    _, whole = run("whole", "--per_device_train_batch_size", "4")
    _, parts = run("parts", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "4")
    assert curve(parts) == pytest.approx(curve(whole), rel=1e-5)
    assert curve(parts, "train/grad_norm") == pytest.approx(curve(whole, "train/grad_norm"), rel=1e-4)


def test_bf16_autocast_follows_the_fp32_curve_with_fp32_weights_and_is_another_run(run, tmp_path, monkeypatch, capsys):
    flags = ["--document_boundary", "carry", "--max_train_steps", "3"]
    _, full = run("full", *flags, model=HOPE)
    with monkeypatch.context() as patch:
        # What `accelerate launch` sets for `mixed_precision: bf16`.
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        status, half = run("half", *flags, model=HOPE)
    assert status == 0
    assert curve(half) != curve(full)
    assert curve(half) == pytest.approx(curve(full), rel=1e-2)
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").state_dict()
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    status, _ = run("half", *flags, model=HOPE)
    assert status == 2 and "mixed_precision was 'bf16' and is now 'no'" in capsys.readouterr().err


def test_carried_memories_change_what_a_row_begins_with(run, monkeypatch):
    # The same rows in the same order: only the memories at a row's beginning differ, from the second on.
    small = ["--document_boundary", "carry", "--max_train_steps", "3", "--learning_rate", "1e-9"]
    _, carried = run("carried", *small, model=HOPE)
    monkeypatch.setattr(CarriedMemory, "hand_over", CarriedMemory.restart)
    _, forgotten = run("forgotten", *small, model=HOPE)
    assert curve(carried)[0] == curve(forgotten)[0]
    assert all(a != b for a, b in zip(curve(carried)[1:], curve(forgotten)[1:], strict=True))


@pytest.mark.parametrize(
    "flags", [["--gradient_checkpointing"], ["--gradient_checkpointing", "--document_boundary", "carry"]]
)
def test_gradient_checkpointing_changes_memory_and_not_the_curve(run, flags):
    _, plain = run("plain", "--max_train_steps", "3", *flags[1:], model=HOPE)
    _, recomputed = run("recomputed", "--max_train_steps", "3", *flags, model=HOPE)
    assert curve(recomputed) == pytest.approx(curve(plain), rel=1e-6)


def test_wandb_offline(run, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    names = ["--run_name", "name", "--project_name", "project"]
    import wandb

    told, init = [], wandb.init
    monkeypatch.setattr(wandb, "init", lambda **options: told.append([*sys.argv]) or init(**options))
    # A password in the hook reaches neither W&B nor a file of the run.
    hook = ["--checkpoint_hook", "true Password1"]
    monkeypatch.setattr(sys, "argv", ["hope-hf", "train", *hook])
    status, _ = run("a", "--report_to", "wandb", "--max_train_steps", "2", *names, *hook)
    assert status == 0 and told == [["hope-hf"]] and sys.argv[1] == "train"
    assert list((tmp_path / "a" / "wandb").glob("offline-run-*/*.wandb"))
    files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
    assert [path for path in files if b"Password1" in path.read_bytes()] == []


@pytest.mark.parametrize(
    "flags, project, name",
    [([], "of_the_environment", "first"), (["--project_name", "mine", "--run_name", "own"], "mine", "own")],
)
def test_the_environment_names_project_and_run_unless_a_flag_does(run, monkeypatch, flags, project, name):
    begun = []
    monkeypatch.setattr("accelerate.Accelerator.init_trackers", lambda _, *names, **more: begun.append((names, more)))
    monkeypatch.setenv("WANDB_PROJECT", "of_the_environment")
    monkeypatch.setenv("WANDB_NAME", "first")
    assert run("a", "--report_to", "wandb", "--max_train_steps", "1", *flags)[0] == 0
    ((names, more),) = begun
    assert names == (project,) and more["init_kwargs"]["wandb"]["name"] == name


def test_vectors_learn_at_a_rate_of_their_own(run, capsys):
    _, plain = run("plain", "--max_train_steps", "3", model=HOPE)
    assert "(vectors" not in capsys.readouterr().out
    _, faster = run("faster", "--max_train_steps", "3", "--vector_learning_rate", "0.1", model=HOPE)
    assert "learning rate 0.005 (vectors 0.1), cosine" in capsys.readouterr().out
    rates = [[row["train/learning_rate"] for row in rows if "train/loss" in row] for rows in (plain, faster)]
    assert rates[0] == rates[1]
    assert curve(plain)[0] == curve(faster)[0] and curve(plain)[2] != curve(faster)[2]
