"""Training in fp16 with a dynamic loss scale: what is scaled, when the scale falls, and how steps are counted.

On the CPU with torch's scaler for it, in place of the one that accelerate makes for GPUs.
"""


import accelerate.accelerator
import pytest
import torch
from training_runs import (
    HOPE,
    change_losses,
    curve,
    forget_the_end,
    fp16_on_cpu,
    mask_steps,
    parts_of_checkpoint,
    same_tensors,
)

from hope_hf.training import trainer


@pytest.fixture
def fp16(run, monkeypatch):
    """`run` in fp16; `scaler` are options of the scaler."""

    def start(name: str, *flags, scaler: dict | None = None, **options):
        with monkeypatch.context() as patch:
            fp16_on_cpu(patch, **scaler or {})
            return run(name, *flags, **options)

    return start


def compute_in_fp32(monkeypatch):
    """Use only the scaler, without autocast."""
    off = torch.autocast("cpu", enabled=False)
    monkeypatch.setattr(accelerate.accelerator, "get_mixed_precision_context_manager", lambda *a, **k: off)


def overflowing(loss):
    """The same loss, and a gradient that is not finite."""
    return loss + (loss - loss.detach()) * 1e38 * 1e38


def test_scale_at_its_minimum_ends_the_run(fp16, monkeypatch, capsys):
    change_losses(monkeypatch, lambda step, loss: overflowing(loss) * 4 if step > 2 else loss)
    status, rows = fp16("run", "--max_train_steps", 40, "--checkpointing_steps", 2, scaler={"init_scale": 4.0})
    assert status == 1
    # Two to get from 4 to 1.
    assert rows[-1]["step"] == 2 + 2 + trainer.MOST_SKIPS_IN_A_ROW - 1
    assert rows[-1]["train/overflowed_steps"] == 2 and rows[-1]["train/loss_scale"] == 1
    error = capsys.readouterr().err
    assert "not finite in 10 steps in a row, the last one 14, with the loss scaled by 1:" in error


def test_a_cpu_is_refused(run, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert run("run")[0] == 2
    assert "mixed_precision fp16 needs a GPU" in capsys.readouterr().err


def test_scaled_steps_are_the_unscaled_ones(run, fp16, tmp_path, monkeypatch):
    """In fp32, where a power of two changes no digit: clipping, level clocks and Muon see unscaled gradients."""
    flags = ["--max_grad_norm", 0.5, "--gradient_accumulation_steps", 2, "--optimizer", "muon"]
    _, plain = run("plain", *flags, model=HOPE)
    compute_in_fp32(monkeypatch)
    _, scaled = fp16("scaled", *flags, model=HOPE, scaler={"growth_interval": 3})
    assert curve(scaled, "train/loss_scale") == [2.0 ** (16 + step // 3) for step in range(8)]
    for name in ("train/loss", "train/grad_norm", "level/1/updates", "eval/loss"):
        assert curve(scaled, name) == curve(plain, name), name
    scaled_file, plain_file = (tmp_path / name / "model.safetensors" for name in ("scaled", "plain"))
    assert scaled_file.read_bytes() == plain_file.read_bytes()


def test_overflows_lower_the_scale_and_are_no_skipped_steps(fp16, tmp_path, capsys):
    # More in a row than the limit of non-finite steps.
    start, steps = 2.0**32, 24
    status, rows = fp16("run", "--max_train_steps", steps, scaler={"init_scale": start})
    downs = curve(rows, "train/overflowed_steps")
    before = [0, *downs[:-1]]
    assert status == 0 and trainer.MOST_SKIPS_IN_A_ROW < downs[-1] < steps
    assert curve(rows, "train/skipped_steps") == [0] * steps
    overflowed = [after > earlier for after, earlier in zip(downs, before, strict=True)]
    assert [norm is None for norm in curve(rows, "train/grad_norm")] == overflowed
    assert curve(rows, "train/loss_scale") == [start / 2**count for count in before]
    losses = curve(rows)
    assert None not in losses and losses[-1] < losses[0]
    assert f"loss scale {start:g}, the next one is {start / 2:g}" in capsys.readouterr().out
    assert "NaN" not in (tmp_path / "run" / "metrics.jsonl").read_text()


SAVES = ["--checkpointing_steps", 1, "--save_total_limit", 9]


def test_overflow_changes_neither_weights_nor_clocks_and_a_run_continues_behind_it(fp16, tmp_path, monkeypatch):
    flags, scaler = [*SAVES, "--max_train_steps", 6], {"growth_interval": 3}
    with monkeypatch.context() as patch:
        change_losses(patch, lambda step, loss: overflowing(loss) if step == 2 else loss)
        status, whole = fp16("a", *flags, scaler=scaler, model=HOPE)
    assert status == 0 and curve(whole, "train/overflowed_steps") == [0, 1, 1, 1, 1, 1]
    assert curve(whole, "level/0/tokens_since_update") == [128, 128, 0, 128, 0, 128]
    first, second, third, last = (parts_of_checkpoint(tmp_path / "a", step) for step in (1, 2, 3, 6))
    assert same_tensors(first, second) and not same_tensors(first, third)
    # Within the good steps after which the scale grows again.
    forget_the_end(tmp_path / "a", 5, 6)
    _, continued = fp16("a", *flags, scaler=scaler, model=HOPE)
    for name in ("train/loss", "train/loss_scale", "train/overflowed_steps", "train/grad_norm"):
        assert curve(continued, name) == curve(whole, name), name
    assert curve(whole, "train/loss_scale") == [2.0**power for power in (16, 16, 15, 15, 15, 16)]
    assert same_tensors(parts_of_checkpoint(tmp_path / "a", 6), last)


def test_a_step_without_a_token_leaves_the_scale(fp16, monkeypatch, tmp_path):
    mask_steps(monkeypatch, 2)
    status, rows = fp16("a", *SAVES, "--max_train_steps", 3, scaler={"growth_interval": 2})
    assert status == 0
    assert same_tensors(parts_of_checkpoint(tmp_path / "a", 1), parts_of_checkpoint(tmp_path / "a", 2))
    assert curve(rows, "train/loss_scale") == [2.0**16] * 3 and curve(rows, "train/overflowed_steps") == [0] * 3
