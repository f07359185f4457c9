"""Every check of a dry run: when it is content, when it warns, when it fails."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hope_hf.common.run_arguments import Arguments
from hope_hf.plan import Planned
from hope_hf.training.engines.base import Update
from hope_hf.training.preflight.checks import ALLOCATOR, CHECKS
from hope_hf.training.preflight.facts import Facts, FreeMemory, Gpu, Text, read_gpu
from hope_hf.training.preflight.run import judge

GIB = 2**30
ARGS = Arguments(output_dir="runs/x", checkpointing_steps=1)
GPU = Gpu(busy=0, used=10, temperature=35)
FACTS = Facts(
    options=ARGS,
    trackers=[],
    processes=8,
    local_processes=4,
    on_gpu=True,
    in_parts=False,
    gpu=GPU,
    free=FreeMemory(device=80 * GIB, host=100 * GIB, disk=100 * GIB),
    sizes=Planned(
        peak=40 * GIB,
        is_estimate=False,
        weights=4 * GIB,
        optimizer=8 * GIB,
        offloaded=0,
        is_shared_out=True,
        whole_gradients=0,
        saved=4 * GIB,
    ),  # fmt: skip
    text=Text(rows=1000, rows_per_step=64, validation_rows=10, description="books"),
    in_use=False,
    unwritable=None,
    used=0,
    continues=None,
    step=0,
    total_steps=20,
)


def facts(**changes) -> Facts:
    """FACTS with other fields, also those of its free memory, sizes, text and flags."""
    found = FACTS
    for part in ("free", "sizes", "text", "options"):
        own = {name: changes.pop(name) for name in list(changes) if hasattr(getattr(found, part), name)}
        found = replace(found, **{part: replace(getattr(found, part), **own)})
    return replace(found, **changes)


def gpu(**changes) -> dict:
    return {"gpu": replace(GPU, **changes)}


CASES = [
    ("processes", {}, "ok", "8 processes have the same flags, data and code"),
    ("run", {"continues": Path("runs/x/checkpoint-5"), "step": 5}, "ok", "from runs/x/checkpoint-5 at step 5 of 20"),
    ("run", {"continues": Path("runs/x/checkpoint-20"), "step": 20}, "warn", "only finishes it"),
    ("run", {"in_use": True}, "fail", "runs/x is in use"),
    ("trackers", {}, "ok", "none besides metrics.jsonl"),
    ("data", {}, "ok", "books; 1.3 epochs"),
    ("data", {"rows": 63}, "warn", "a step reads 64 rows and the training text has 63"),
    ("data", {"total_steps": 63}, "warn", "read the training text 4.0 times"),
    ("data", {"rows": 7}, "fail", "7 rows for 8 processes"),
    # Three checkpoints of 12 GiB and 4 of weights.
    ("disk", {"disk": 52 * GIB}, "ok", "of 12.00 GiB and the weights need 40.00 GiB more, 52.00 GiB free"),
    ("disk", {"disk": 39 * GIB}, "fail", "free space, lower --save_total_limit"),
    ("disk", {"disk": 39 * GIB, "used": 24 * GIB}, "ok", "need 16.00 GiB more"),
    ("disk", {"disk": 15 * GIB, "checkpointing_steps": 0}, "fail", "need 16.00 GiB more, 15.00 GiB free"),
    # A LoRA of 1 GiB beside 4 GiB of weights.
    ("disk", {"disk": 40 * GIB, "saved": GIB}, "ok", "of 9.00 GiB and the weights need 28.00 GiB more"),
    ("disk", {"unwritable": "Invalid argument"}, "fail", "runs/x takes no checkpoint (Invalid argument)"),
    # Four processes build the model of 4 GiB.
    ("host", {"host": 18 * GIB}, "ok", "needs 16.00 GiB of 18.00 GiB"),
    ("host", {"host": 15 * GIB}, "fail", "start fewer processes a machine"),
    ("host", {"host": 15 * GIB, "init": "sharded"}, "ok", "needs 4.00 GiB"),
    ("host", {"host": 30 * GIB, "offloaded": 40 * GIB}, "fail", "needs 44.00 GiB"),
    # Half of the parts are copied on this machine: 6 GiB, and 4 of gathered weights.
    ("host", {"host": 100 * GIB, "async_save": True, "offloaded": 20 * GIB}, "ok", "needs 30.00 GiB"),
    ("host", {"async_save": True, "offloaded": 20 * GIB, "is_shared_out": False}, "ok", "needs 36.00 GiB"),
    ("host", {"on_gpu": False}, "fail", "needs 164.00 GiB"),
    ("gpus", {}, "ok", "0 % busy, 0.00 GiB used, 35 C"),
    ("gpus", gpu(busy=50), "warn", "another program uses it"),
    ("gpus", gpu(temperature=90), "fail", "too hot to begin"),
    ("gpus", {"gpu": "no driver"}, "warn", "idle and cool or not is unknown (no driver): pip install nvidia-ml-py"),
    ("gpus", {"gpu": None, "on_gpu": False}, "ok", "none, the run uses the CPU"),
    ("allocator", {}, "warn", "export PYTORCH_ALLOC_CONF=expandable_segments:True"),
    ("memory", {}, "ok", "a step, planned, needs 40.00 GiB of 80.00 GiB free"),
    ("memory", {"peak": 81 * GIB}, "fail", "lower --per_device_train_batch_size"),
    ("memory", {"peak": 81 * GIB, "whole_gradients": 9 * GIB}, "fail", "give --sync_each_batch (9.00 GiB are whole"),
    ("memory", {"peak": 81 * GIB}, "fail", "give --gradient_checkpointing, see `hope-hf plan`"),
    # nothing that is set already, and a batch of one row cannot be lowered
    (
        "memory", {"peak": 81 * GIB, "gradient_checkpointing": "true", "per_device_train_batch_size": 1}, "fail",
        "free: lower --block_size, see `hope-hf plan`",
    ),
    ("memory", {"on_gpu": False, "peak": 18 * GIB}, "warn", "needs 72.00 GiB of 100.00 GiB free, almost all: lower"),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in (*ALLOCATOR, "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("name", "changes", "level", "words"), CASES)
def test_check(name, changes, level, words):
    found = CHECKS[name](facts(**changes))
    assert (found.level, words in found.text) == (level, True), found


@pytest.mark.parametrize("name", ALLOCATOR)
def test_the_allocator_is_set_by_either_variable(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:128, expandable_segments:True")
    assert CHECKS["allocator"](FACTS).level == "ok"
    monkeypatch.setenv(name, "expandable_segments:False")
    assert CHECKS["allocator"](FACTS).level == "warn"


@pytest.mark.parametrize(("mode", "level"), [("offline", "ok"), ("disabled", "warn"), ("online", "ok")])
def test_what_wandb_will_do_is_said(monkeypatch, mode, level):
    monkeypatch.setenv("WANDB_MODE", mode)
    assert CHECKS["trackers"](facts(trackers=["tensorboard", "wandb"])).level == level


def test_a_process_asks_about_its_own_gpu_before_it_uses_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert read_gpu() is None
    (tmp_path / "nvidia-smi").touch(0o755)
    assert read_gpu() == "torch does not see it"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    for name, factor in (("utilization", 1), ("device_memory_used", 10), ("temperature", 20)):
        monkeypatch.setattr(torch.cuda, name, lambda own, factor=factor: factor * own)
    assert read_gpu() == Gpu(busy=3, used=30, temperature=60)

    def fail(own):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "temperature", fail)
    assert read_gpu() == "nvidia-ml-py does not seem to be installed"


@pytest.mark.parametrize(
    ("outcome", "peak", "total", "level", "words"),
    [
        ("stepped", 40.0, 80.0, "ok", "loss 2.5, gradient norm 1.5, 3.0 s (a first step is slow), peak 40.00 GiB"),
        ("stepped", 40.0, None, "ok", "peak 40.00 GiB"),
        ("overflowed", 40.0, 80.0, "ok", "fp16 began at loss scale 65536"),
        ("stepped", 75.0, 80.0, "warn", "peak 75.00 GiB of 80.00, almost all"),
        ("skipped", 40.0, 80.0, "fail", "nothing was updated"),
        ("empty", 40.0, 80.0, "warn", "no token to learn"),
    ],
)
def test_the_step_is_judged(outcome, peak, total, level, words):
    found = judge(ARGS, 2.5, Update(outcome, 1.5, 65536.0), 3.0, peak, total)
    assert (found.level, words in found.text) == (level, True), found
