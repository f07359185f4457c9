"""The simulated step against the same step with real tensors, as torch's allocator and the system count it."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import BATCHES, SMALL, small_config

from hope_hf import PRESETS, HopeConfig
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions
from hope_hf.plan.memory import memory
from hope_hf.plan.shapes import shapes_of
from hope_hf.plan.simulate import Step, can_simulate, simulate

WORKER = Path(__file__).with_name("step_worker.py")


def options_of(name: str, **options) -> dict:
    rows, tokens = BATCHES[name]
    return {"batch_size": rows, "block_size": tokens} | options


def run_for_real(tasks: list[dict], processes: int) -> list[dict]:
    """What `step_worker.py` measures in each task."""
    # Else glibc keeps what is freed, and resident memory says little.
    environment = {
        **os.environ, "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    command = [sys.executable]
    if processes > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command += [str(WORKER), json.dumps(tasks)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=500)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[0].removeprefix("RESULT "))


def simulated(task: dict, processes: int):
    strategy = STRATEGIES[task["strategy"]]
    launch = Launch(strategy, processes, processes if strategy.shared else 1, task["precision"])
    return simulate(small_config(task["name"]), launch, StepOptions(**task["options"]))


def task(name: str, strategy: str, precision: str = "no", **options) -> dict:
    return {
        "name": name, "config": SMALL[name], "strategy": strategy, "precision": precision,
        "options": options_of(name, **options),
    }  # fmt: skip


CASES = {
    "single": (
        1,
        [task("pilot", "ddp", "bf16", batch_size=2, block_size=512)] + [task(name, "ddp") for name in SMALL],
    ),
    "ddp": (
        2,
        [task(name, "ddp") for name in SMALL]
        + [task("llama", "ddp", accumulation=2)]
        + [task("llama", "ddp", checkpointing=part) for part in ("block", "mixer")],
    ),
    "fsdp2": (
        2,
        [task(name, "full_shard") for name in SMALL]
        + [
            task("llama", "full_shard", "bf16"),
            task("llama", "shard_grad_op", "bf16"),
            task("llama", "full_shard", accumulation=2),
            task("llama", "full_shard", accumulation=2, sync_each_batch=True),
        ],
    ),
}


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_simulated_peak_is_within_5_percent_of_the_real_one(case):
    processes, tasks = CASES[case]
    real = run_for_real(tasks, processes)
    rows = []
    for one, measured in zip(tasks, real, strict=True):
        peak = simulated(one, processes).peak
        rows.append((one["name"], one["strategy"], one["precision"], peak, measured["peak"], measured["resident"]))
        print(*rows[-1], f"{peak / measured['peak'] - 1:+.2%}")
    assert all(abs(peak / measured - 1) < 0.05 for *_, peak, measured, _ in rows), rows
    # Resident memory has the allocator's pages as well.
    pilot = [(peak, resident) for name, *_, peak, _, resident in rows if name == "pilot"]
    print(*(f"resident {peak / resident - 1:+.2%}" for peak, resident in pilot))
    assert pilot and all(abs(peak / resident - 1) < 0.15 for peak, resident in pilot), rows


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_simulated_by_its_last_block(preset):
    (*_, kind) = HopeConfig.from_preset(preset).layer_types
    config = HopeConfig.from_preset(preset, num_hidden_layers=1, layer_types=[kind])
    assert kind == ("sparse_attention" if preset.endswith("-hybrid") else "hope_memory")
    assert simulate(config, Launch(STRATEGIES["ddp"], 1, 1), StepOptions(1, 16)).split["activations"]


def test_the_categories_add_up_and_the_process_group_is_gone():
    found = simulate(small_config("tiny"), Launch(STRATEGIES["full_shard"], 8, 8, "bf16"), StepOptions(1, 64))
    assert sum(found.split.values()) == found.peak
    assert {"weights", "optimizer", "activations"} <= set(found.split)
    assert not dist.is_initialized()


def test_shards_shrink_up_to_1024_processes():
    step = StepOptions(1, 16)
    weights = [
        simulate(small_config("tiny", num_hidden_layers=1), Launch(STRATEGIES["full_shard"], world, world), step)
        .split["weights"]
        for world in (2, 1024)
    ]  # fmt: skip
    assert weights[1] < weights[0] / 100


def test_a_hybrid_shards_inside_a_replica_only():
    step, config = StepOptions(1, 16), small_config("tiny", num_hidden_layers=1)
    full = simulate(config, Launch(STRATEGIES["full_shard"], 4, 4), step)
    hybrid = simulate(config, Launch(STRATEGIES["hybrid_shard"], 16, 4), step)
    assert hybrid.split["weights"] == full.split["weights"]


def test_whole_gradients_between_batches_are_simulated():
    launch, config = Launch(STRATEGIES["full_shard"], 8, 8), small_config("llama")
    held, synced = (
        simulate(config, launch, StepOptions(1, 16, accumulation=4, sync_each_batch=sync)).peak
        for sync in (False, True)
    )
    parameters = 25_570_000
    assert held - synced > 0.7 * 4 * parameters


@pytest.mark.parametrize("scale, clipped", [(2.0, 1.0), (0.5, 0.5), (0.0, 0.0)])
def test_the_step_clips_as_the_trainer_does(scale, clipped, monkeypatch):
    config = small_config("tiny", num_hidden_layers=1)
    step = Step(config, Launch(STRATEGIES["ddp"], 1, 1), StepOptions(1, 16))
    # whose gradient is None
    step.model.unused = torch.nn.Parameter(torch.zeros(1))
    first, *others = (parameter for name, parameter in step.model.named_parameters() if name != "unused")
    for parameter in (first, *others):
        parameter.grad = torch.zeros_like(parameter)
    first.grad.view(-1)[:4] = scale / 2
    norms = []
    monkeypatch.setattr(step.optimizer, "step", lambda: norms.append(float(first.grad.norm())))
    step._update()
    assert norms == [pytest.approx(clipped, abs=1e-6)]


def test_attention_on_the_cpu_is_simulated_without_its_dropout():
    step, launch = StepOptions(1, 512), Launch(STRATEGIES["ddp"], 1, 1)
    peaks = [simulate(small_config("gpt2", attn_pdrop=rate), launch, step).peak for rate in (0.0, 0.1)]
    assert peaks[0] == peaks[1]


def test_engines_without_simulation_say_so():
    assert "deepspeed" in can_simulate(small_config("llama"), Launch(STRATEGIES["zero3"], 2, 2))
    assert "offloading" in can_simulate(small_config("llama"), Launch(STRATEGIES["fsdp_offload"], 2, 2))
    assert can_simulate(small_config("llama"), Launch(STRATEGIES["full_shard"], 2, 2)) is None


def test_kernels_of_gpus_are_not_simulated(monkeypatch):
    launch, default = Launch(STRATEGIES["ddp"], 1, 1), HopeConfig()
    assert can_simulate(default, launch) is None
    monkeypatch.setenv("HOPE_KERNELS", "fla")
    assert can_simulate(default, launch) == "kernels of flash-linear-attention are not simulated"
    for without in (HopeConfig(memory_rule="paper"), HopeConfig(memory_projections=["k"]), small_config("llama")):
        assert can_simulate(without, launch) is None
    kept = StepOptions(1, 2048)
    with_kernels = memory(default, shapes_of(default), launch, kept).peak
    monkeypatch.setenv("HOPE_KERNELS", "torch")
    assert with_kernels < memory(default, shapes_of(default), launch, kept).peak


@pytest.mark.long
def test_mid_at_2048_tokens_is_planned_within_3_minutes():
    # Of the processor: other programs may keep it busy.
    start = time.process_time()
    found = simulate(
        HopeConfig.from_preset("mid"), Launch(STRATEGIES["full_shard"], 8, 8, "bf16"), StepOptions(8, 2048)
    )
    seconds = time.process_time() - start
    print(f"{found.peak / 2**30:.1f} GiB in {seconds:.0f} s, {found.seconds:.0f} s on the clock")
    assert seconds < 180
