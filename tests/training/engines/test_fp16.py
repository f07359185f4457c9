"""Training in fp16 with a dynamic loss scale: what is scaled, when the scale falls, and how steps are counted.

On the CPU with torch's scaler for it, in place of the one that accelerate makes for GPUs.
"""

import json
import math

import accelerate.accelerator
import pytest
import torch
from safetensors.torch import load_file
from training_runs import HOPE, curve, forget_the_end, fp16_on_cpu, mask_steps, parts_of_checkpoint

from hope_hf.training import trainer


@pytest.fixture
def fp16(run, monkeypatch):
    """`run` in fp16; `scaler` are options of the scaler."""

    def start(name: str, *flags, scaler: dict | None = None, **options):
        with monkeypatch.context() as patch:
            fp16_on_cpu(patch, **scaler or {})
            return run(name, *flags, **options)

    return start


def poison(monkeypatch, loss_of):
    """`loss_of(step, loss)` instead of the loss of every step, counted from 1."""
    steps, loss = iter(range(1, 1000)), trainer.summed_loss
    monkeypatch.setattr(trainer, "summed_loss", lambda *arguments: loss_of(next(steps), loss(*arguments)))


def compute_in_fp32(monkeypatch):
    """Use only the scaler, without autocast."""
    off = torch.autocast("cpu", enabled=False)
    monkeypatch.setattr(accelerate.accelerator, "get_mixed_precision_context_manager", lambda *a, **k: off)


def overflowing(loss):
    """The same loss, and a gradient that is not finite."""
    return loss + (loss - loss.detach()) * 1e38 * 1e38


def test_a_cpu_is_refused(run, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    status, _ = run("run")
    assert status == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("mixed_precision fp16 needs a GPU and this process has cpu: set 'no' or bf16 in the config.")
    )


@pytest.mark.parametrize("model", [None, HOPE], ids=["llama", "hope"])
def test_the_curve_is_that_of_fp32(run, fp16, tmp_path, model):
    options = {"model": model} if model else {}
    _, full = run("full", "--max_grad_norm", 0.5, **options)
    status, half = fp16("half", "--max_grad_norm", 0.5, **options)
    assert status == 0
    for name in ["train/loss", "train/grad_norm", *(n for n in full[0] if n.endswith("initial_state_grad_norm"))]:
        assert curve(half, name) == pytest.approx(curve(full, name), rel=2e-2), name
    assert curve(half) != curve(full)
    assert curve(half, "train/loss_scale") == [2.0**16] * 8
    assert curve(half, "train/overflowed_steps") == [0] * 8
    assert "train/loss_scale" not in full[0]
    weights = load_file(tmp_path / "half" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


@pytest.mark.parametrize("flags", [[], ["--optimizer", "muon"]], ids=["adamw", "muon"])
def test_scaled_steps_are_the_unscaled_ones(run, fp16, tmp_path, monkeypatch, flags):
    """In fp32, where a power of two changes no digit: clipping, level clocks and Muon see unscaled gradients."""
    flags = ["--max_grad_norm", 0.5, "--gradient_accumulation_steps", 2, *flags]
    _, plain = run("plain", *flags, model=HOPE)
    compute_in_fp32(monkeypatch)
    _, scaled = fp16("scaled", *flags, model=HOPE, scaler={"growth_interval": 3})
    assert curve(scaled, "train/loss_scale") == [2.0 ** (16 + step // 3) for step in range(8)]
    for name in plain[0]:
        if "second" not in name and "percent" not in name and "memory_gib" not in name:
            assert curve(scaled, name) == curve(plain, name), name
    weights, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("scaled", "plain"))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_overflows_lower_the_scale_and_are_no_skipped_steps(fp16, tmp_path, capsys):
    # More in a row than the limit of non-finite steps.
    start = 2.0**48
    status, rows = fp16("run", "--max_train_steps", 40, scaler={"init_scale": start})
    assert status == 0
    scales, downs = curve(rows, "train/loss_scale"), curve(rows, "train/overflowed_steps")
    assert trainer.MOST_SKIPS_IN_A_ROW < downs[-1] < 40
    assert curve(rows, "train/skipped_steps") == [0] * 40
    norms = curve(rows, "train/grad_norm")
    for index in range(40):
        assert (norms[index] is None) == (downs[index] > (downs[index - 1] if index else 0))
    assert scales == [start / 2 ** (downs[index - 1] if index else 0) for index in range(40)]
    losses = curve(rows)
    assert None not in losses and losses[-1] < losses[0]
    sentence = f"step 1 left out: the gradient overflowed at loss scale {start:g}, the next one is {start / 2:g}\n"
    assert sentence in capsys.readouterr().out
    for line in (tmp_path / "run" / "metrics.jsonl").open():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_overflow_changes_neither_weights_nor_clocks(fp16, tmp_path, monkeypatch):
    poison(monkeypatch, lambda step, loss: overflowing(loss) if step == 2 else loss)
    status, rows = fp16("a", "--max_train_steps", 3, "--checkpointing_steps", 1, "--save_total_limit", 9, model=HOPE)
    assert status == 0 and curve(rows, "train/overflowed_steps") == [0, 1, 1]
    assert curve(rows, "level/0/tokens_since_update") == [128, 128, 0]
    for file in ("model.safetensors", "optimizer_rank_0.safetensors"):
        first, second, third = (load_file(tmp_path / "a" / f"checkpoint-{step}" / file) for step in (1, 2, 3))
        assert all(torch.equal(second[name], first[name]) for name in first)
        assert any(not torch.equal(third[name], first[name]) for name in first)


def test_scale_grows_again_after_as_many_good_steps_as_before(fp16, monkeypatch):
    poison(monkeypatch, lambda step, loss: overflowing(loss) if step == 2 else loss)
    _, rows = fp16("run", scaler={"growth_interval": 3})
    assert curve(rows, "train/loss_scale") == [2.0**power for power in (16, 16, 15, 15, 15, 16, 16, 16)]


def test_a_step_without_a_token_leaves_the_scale(fp16, monkeypatch, tmp_path):
    mask_steps(monkeypatch, 2)
    saves = ["--max_train_steps", 3, "--checkpointing_steps", 1, "--save_total_limit", 9]
    status, rows = fp16("a", *saves, scaler={"growth_interval": 2})
    first, second = (parts_of_checkpoint(tmp_path / "a", step) for step in (1, 2))
    assert status == 0 and all(torch.equal(first[name], second[name]) for name in first)
    assert curve(rows, "train/loss_scale") == [2.0**16] * 3 and curve(rows, "train/overflowed_steps") == [0] * 3


def test_loss_that_is_not_finite_is_skipped_and_leaves_the_scale(fp16, monkeypatch):
    poison(monkeypatch, lambda step, loss: loss * math.nan if step == 3 else loss)
    status, rows = fp16("run", scaler={"growth_interval": 4})
    assert status == 0
    assert curve(rows, "train/skipped_steps") == [0, 0, 1, 1, 1, 1, 1, 1]
    assert curve(rows, "train/overflowed_steps") == [0] * 8
    # Neither lowered, nor counted as a good step.
    assert curve(rows, "train/loss_scale") == [2.0**16] * 5 + [2.0**17] * 3


def test_scale_at_its_minimum_ends_the_run(fp16, monkeypatch, capsys):
    poison(monkeypatch, lambda step, loss: overflowing(loss) * 4 if step > 2 else loss)
    status, rows = fp16("run", "--max_train_steps", 40, "--checkpointing_steps", 2, scaler={"init_scale": 4.0})
    assert status == 1
    # Two to get from 4 to 1.
    assert rows[-1]["step"] == 2 + 2 + trainer.MOST_SKIPS_IN_A_ROW - 1
    assert rows[-1]["train/overflowed_steps"] == 2 and rows[-1]["train/loss_scale"] == 1
    error = capsys.readouterr().err
    assert "not finite in 10 steps in a row, the last one 14, with the loss scaled by 1:" in error


def test_continued_run_has_the_scale_of_the_uninterrupted_one(fp16, tmp_path):
    scaler = {"init_scale": 2.0**30, "growth_interval": 3}
    saves = ["--checkpointing_steps", 4, "--max_train_steps", 12, "--save_total_limit", 9]
    _, whole = fp16("a", *saves, scaler=scaler, model=HOPE)
    scales = curve(whole, "train/loss_scale")
    weights = load_file(tmp_path / "a" / "model.safetensors")
    # Overflows before and after the break, which is between two increases.
    downs = curve(whole, "train/overflowed_steps")
    for saved, later in ((4, 8), (8, 12)):
        assert downs[saved - 1] > 0, downs
        state = json.loads((tmp_path / "a" / f"checkpoint-{saved}" / "trainer.json").read_text())["loss_scaling"]
        assert state["scale"] == scales[saved], later
        forget_the_end(tmp_path / "a", *(step for step in (8, 12) if step > saved))
        _, continued = fp16("a", *saves, scaler=scaler, model=HOPE)
        for name in ("train/loss", "train/loss_scale", "train/overflowed_steps", "train/grad_norm"):
            assert curve(continued, name) == curve(whole, name), name
        own = load_file(tmp_path / "a" / "model.safetensors")
        assert all(torch.equal(own[name], weights[name]) for name in weights)
