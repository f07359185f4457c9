"""The plan of a run that has started is that of its launch file."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hope_hf import HopeConfig
from hope_hf.plan import StepOptions, plan_running
from hope_hf.plan.memory import memory
from hope_hf.plan.running import launch_of
from hope_hf.plan.shapes import shapes_of
from hope_hf.plan.strategy import read_launch_file


def accelerator(kind: str, processes: int, precision: str = "no", mesh: int | None = None, **state):
    """What the planner reads of an Accelerator."""
    parallel = None if mesh is None else SimpleNamespace(dp_replicate_size=mesh)
    return SimpleNamespace(
        distributed_type=DistributedType[kind],
        num_processes=processes,
        mixed_precision=precision,
        parallelism_config=parallel,
        state=SimpleNamespace(**state),
    )


def fsdp(**options) -> dict:
    return {"fsdp_plugin": FullyShardedDataParallelPlugin(**options)}


def zero(stage: int, device: str = "none") -> dict:
    offload = {f"offload_{name}": {"device": device} for name in ("optimizer", "param")}
    return {"deepspeed_plugin": SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage, **offload}})}


RUNNING = {
    "single": accelerator("NO", 1),
    "single_bf16": accelerator("NO", 1, "bf16"),
    "ddp": accelerator("MULTI_GPU", 8),
    "fsdp2": accelerator("FSDP", 8, **fsdp(fsdp_version=2, reshard_after_forward=True)),
    "fsdp1": accelerator("FSDP", 8, **fsdp(fsdp_version=1, sharding_strategy="FULL_SHARD")),
    "fsdp_offload": accelerator("FSDP", 8, **fsdp(fsdp_version=2, reshard_after_forward=True, cpu_offload=True)),
    "fsdp_hybrid": accelerator("FSDP", 4, mesh=2, **fsdp(fsdp_version=2, reshard_after_forward=True)),
    "deepspeed_zero2": accelerator("DEEPSPEED", 8, **zero(2)),
    "deepspeed_zero3": accelerator("DEEPSPEED", 8, **zero(3)),
    "deepspeed_zero3_offload": accelerator("DEEPSPEED", 8, **zero(3, "cpu")),
}


@pytest.mark.parametrize("name", RUNNING)
def test_a_running_engine_is_planned_as_its_launch_file(name):
    running = RUNNING[name]
    launch = launch_of(running, 8)
    written = read_launch_file(f"accelerate_configs/{name}.yaml", running.num_processes, 1)
    # The precision is the launcher's choice, too.
    assert launch.strategy == written.strategy and launch.parts == written.parts
    assert launch.checkpointing == written.checkpointing and launch.world_size == written.world_size
    assert launch.precision == running.mixed_precision


@pytest.mark.parametrize(
    ("strategy", "key", "parts"),
    [("SHARD_GRAD_OP", "shard_grad_op", 8), ("HYBRID_SHARD", "hybrid_shard", 4), ("NO_SHARD", "ddp", 1)],
)
def test_strategies_of_version_1(strategy, key, parts):
    launch = launch_of(accelerator("FSDP", 8, **fsdp(fsdp_version=1, sharding_strategy=strategy)), 4)
    assert (launch.strategy.key, launch.strategy.engine, launch.parts) == (key, "fsdp1", parts)


def test_sizes_are_those_of_the_whole_model():
    config = HopeConfig.from_preset("pilot")
    step = StepOptions(batch_size=2, block_size=512)
    planned = plan_running(config, RUNNING["fsdp2"], step, per_node=8)
    shapes = shapes_of(config)
    assert planned.weights == 4 * shapes.count
    # Slow levels have a sum of gradients besides Adam's moments.
    assert 8 * shapes.count < planned.optimizer < 12 * shapes.count
    assert planned.memory == memory(config, shapes, launch_of(RUNNING["fsdp2"], 8), step, 8)
    batches = replace(step, accumulation=4)
    reduced = plan_running(config, RUNNING["fsdp2"], replace(batches, sync_each_batch=True), per_node=8)
    assert reduced.memory.peak < plan_running(config, RUNNING["fsdp2"], batches, per_node=8).memory.peak
    assert planned.memory.peak < plan_running(config, RUNNING["ddp"], step, per_node=8).memory.peak
