"""The step that is simulated whole against the same step with real tensors."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import BATCHES, SMALL, small_config
from step_worker import measure

from hope_hf import HopeConfig
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions
from hope_hf.plan.memory import memory
from hope_hf.plan.shapes import shapes_of
from hope_hf.plan.simulate import Step, can_simulate, simulate

WORKER = Path(__file__).with_name("step_worker.py")
SINGLE = Launch(STRATEGIES["ddp"], 1, 1)


def launch_of(key: str, processes: int, precision: str = "no") -> Launch:
    strategy = STRATEGIES[key]
    return Launch(strategy, processes, processes if strategy.shared else 1, precision)


def task(name: str, strategy: str, precision: str = "no", **options) -> dict:
    """What the worker reads: a small model, its launch and its step."""
    rows, tokens = BATCHES[name]
    options = {"batch_size": rows, "block_size": tokens} | options
    return {
        "name": name, "config": SMALL[name], "strategy": strategy, "precision": precision, "options": options
    }  # fmt: skip


def real_peaks(tasks: list[dict], processes: int) -> list[int]:
    """What `step_worker.py` measures in each task."""
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(WORKER), json.dumps(tasks)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


SMALLEST = [task("tiny", "full_shard"), task("llama", "full_shard", "bf16")]
PEAKS = {
    "single": (1, [task("pilot", "ddp", "bf16", batch_size=2), *(task(name, "ddp") for name in SMALL)]),
    "ddp": (2, [
        *(task(name, "ddp") for name in SMALL), task("llama", "ddp", accumulation=2),
        task("llama", "ddp", checkpointing="block"), task("llama", "ddp", checkpointing="mixer"),
    ]),
    "fsdp2": (2, [
        *(task(name, "full_shard") for name in SMALL), task("llama", "shard_grad_op", "bf16"),
        task("llama", "full_shard", accumulation=2), task("llama", "full_shard", accumulation=2, sync_each_batch=True),
    ]),
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize(
    ("processes", "tasks"),
    [(2, SMALLEST), *(pytest.param(*case, id=name, marks=pytest.mark.long) for name, case in PEAKS.items())],
)
def test_simulated_peaks_are_within_5_percent_of_real_ones(processes, tasks):
    for one, real in zip(tasks, real_peaks(tasks, processes), strict=True):
        launch = launch_of(one["strategy"], processes, one["precision"])
        peak = simulate(small_config(one["name"]), launch, StepOptions(**one["options"])).peak
        print(one["name"], one["strategy"], one["precision"], peak, real, f"{peak / real - 1:+.2%}")
        assert abs(peak / real - 1) < 0.05, one


# Width, layers, rows and tokens of models of 1, 10, 20 and 30 million parameters.
MILLIONS = [(256, 4, 4, 512), (384, 5, 4, 512), (512, 5, 4, 512)]
ON_CPU = [(128, 2, 1, 256), *(pytest.param(*case, marks=pytest.mark.long) for case in MILLIONS)]


@pytest.mark.parametrize(("width", "layers", "rows", "tokens"), ON_CPU)
def test_a_step_on_a_cpu_holds_what_is_planned_of_the_scan_in_cpp(width, layers, rows, tokens, monkeypatch):
    monkeypatch.delenv("HOPE_KERNELS")
    fields = {"hidden_size": width, "num_hidden_layers": layers, "level_intermediate_sizes": [1536]}
    config = small_config("tiny", **fields)
    options = {"batch_size": rows, "block_size": tokens}
    step = StepOptions(**options)
    launch = replace(SINGLE, on_cpu=True)
    planned = memory(config, shapes_of(config), launch, step).peak
    real = measure({"strategy": "ddp", "precision": "no", "config": SMALL["tiny"] | fields, "options": options}, 1)
    print(f"{planned / 2**20:.1f} MiB planned, {real / 2**20:.1f} real, {real / planned - 1:+.2%}")
    assert real == pytest.approx(planned, rel=0.005)
    assert simulate(config, launch, step).peak == pytest.approx(planned, rel=0.005)
    # elsewhere torch's operators are planned, which keep more
    of_torch = memory(config, shapes_of(config), SINGLE, step).peak
    assert of_torch > 1.02 * planned
    assert simulate(config, SINGLE, step).peak == pytest.approx(of_torch, rel=0.005)


def test_categories_shards_and_the_process_group():
    step, config = StepOptions(1, 16), small_config("tiny", num_hidden_layers=1)
    small = simulate(config, launch_of("full_shard", 4, "bf16"), step)
    assert sum(small.split.values()) == small.peak and {"weights", "optimizer", "activations"} <= small.split.keys()
    assert not dist.is_initialized()
    assert simulate(config, launch_of("full_shard", 64), step).split["weights"] < small.split["weights"] / 12
    # a hybrid shards inside a replica only
    hybrid = simulate(config, Launch(STRATEGIES["hybrid_shard"], 16, 4), step)
    assert hybrid.split["weights"] == small.split["weights"]


def test_whole_gradients_between_batches_are_simulated():
    launch, config = launch_of("full_shard", 8), small_config("llama")
    whole = simulate(config, launch, StepOptions(1, 16, accumulation=4)).peak
    reduced = simulate(config, launch, StepOptions(1, 16, accumulation=4, sync_each_batch=True)).peak
    # Those of one process in eight stay either way. torch 2.15 frees a gathered buffer, which was there in both.
    assert whole - reduced > 0.65 * 4 * shapes_of(config).count


@pytest.mark.parametrize("scale, clipped", [(2.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_the_step_clips_as_the_trainer_does(scale, clipped, monkeypatch):
    step = Step(small_config("tiny", num_hidden_layers=1), SINGLE, StepOptions(1, 16))
    first, *others = step.model.parameters()
    for parameter in (first, *others[1:]):
        parameter.grad = torch.zeros_like(parameter)
    first.grad.view(-1)[:4] = scale / 2
    norms = []
    monkeypatch.setattr(step.optimizer, "step", lambda: norms.append(float(first.grad.norm())))
    step._update()
    assert norms == [pytest.approx(clipped, abs=1e-6)]


def test_attention_on_the_cpu_is_simulated_without_its_dropout():
    without, with_dropout = small_config("gpt2", n_layer=1), small_config("gpt2", n_layer=1, attn_pdrop=0.1)
    step = StepOptions(1, 512)
    assert simulate(without, SINGLE, step).peak == simulate(with_dropout, SINGLE, step).peak


def test_what_is_not_simulated_has_a_reason(monkeypatch):
    llama, hope = small_config("llama"), HopeConfig()
    assert can_simulate(llama, launch_of("full_shard", 2)) is can_simulate(hope, SINGLE) is None
    assert "deepspeed" in can_simulate(llama, launch_of("zero3", 2))
    assert "offloading" in can_simulate(llama, launch_of("fsdp_offload", 2))
    of_torch = memory(hope, shapes_of(hope), SINGLE, StepOptions(1, 2048)).peak
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    assert can_simulate(hope, replace(SINGLE, on_cpu=True)) is None
    assert "kernels" in can_simulate(hope, SINGLE) and can_simulate(HopeConfig(memory_rule="paper"), SINGLE) is None
    assert memory(hope, shapes_of(hope), SINGLE, StepOptions(1, 2048)).peak < of_torch
