"""An engine's own launch is the one that the planner reads from the launch file."""

from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.adapters import add_lora
from hope_hf.common.run_arguments import Arguments
from hope_hf.plan import StepOptions, plan_running
from hope_hf.plan.launch import read_launch_file
from hope_hf.training.engines.base import Engine
from hope_hf.training.engines.fsdp1 import FSDP1
from hope_hf.training.engines.fsdp2 import FSDP2
from hope_hf.training.engines.zero import Zero

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
ARGS = Arguments(output_dir="a")


def accelerator(kind: str, processes: int, precision: str = "no", mesh: dict | None = None, **state):
    """What an engine reads of an Accelerator on GPUs."""
    axes = None
    if mesh is not None:
        sizes = {name: SimpleNamespace(size=lambda size=size: size) for name, size in mesh.items()}
        axes = type("Mesh", (dict,), {"mesh_dim_names": tuple(mesh)})(sizes)
    return SimpleNamespace(
        device=torch.device("cuda"), distributed_type=DistributedType[kind], num_processes=processes,
        mixed_precision=precision, torch_device_mesh=axes, state=SimpleNamespace(**state),
    )  # fmt: skip


def plain(kind: str, processes: int, precision: str = "no") -> Engine:
    return Engine(accelerator(kind, processes, precision))


def fsdp(engine: type[Engine], processes: int = 8, mesh: dict | None = None, **options) -> Engine:
    plugin = FullyShardedDataParallelPlugin(**options)
    return engine(accelerator("FSDP", processes, mesh=mesh, fsdp_plugin=plugin), ARGS)


def zero(stage: int, device: str = "none") -> Engine:
    offload = {f"offload_{name}": {"device": device} for name in ("optimizer", "param")}
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage, **offload}})
    return Zero(accelerator("DEEPSPEED", 8, deepspeed_plugin=plugin), ARGS)


SHARDED = {"fsdp_version": 2, "reshard_after_forward": True}
RUNNING = {
    "single": lambda: plain("NO", 1),
    "single_bf16": lambda: plain("NO", 1, "bf16"),
    "ddp": lambda: plain("MULTI_GPU", 8),
    "fsdp2": lambda: fsdp(FSDP2, **SHARDED),
    "fsdp1": lambda: fsdp(FSDP1, fsdp_version=1, use_orig_params=True, sharding_strategy="FULL_SHARD"),
    "fsdp_offload": lambda: fsdp(FSDP2, cpu_offload=True, **SHARDED),
    "fsdp_hybrid": lambda: fsdp(FSDP2, 4, {"dp_replicate": 2, "dp_shard_cp": 2}, **SHARDED),
    "deepspeed_zero2": lambda: zero(2),
    "deepspeed_zero3": lambda: zero(3),
    "deepspeed_zero3_offload": lambda: zero(3, "cpu"),
}


@pytest.mark.parametrize("name", RUNNING)
def test_the_launch_of_an_engine_is_that_of_its_file(name):
    launch = RUNNING[name]().launch()
    written = read_launch_file(f"accelerate_configs/{name}.yaml", launch.world_size, 1)
    assert launch == written and not launch.on_cpu


def test_a_launch_is_on_the_device_of_its_processes():
    engine = plain("MULTI_CPU", 2)
    engine.accelerator.device = torch.device("cpu")
    assert engine.launch().on_cpu


@pytest.mark.parametrize(
    ("strategy", "key", "parts"),
    [("SHARD_GRAD_OP", "shard_grad_op", 8), ("HYBRID_SHARD", "hybrid_shard", 4), ("NO_SHARD", "ddp", 1)],
)
def test_strategies_of_version_1(strategy, key, parts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    launch = fsdp(FSDP1, fsdp_version=1, use_orig_params=True, sharding_strategy=strategy).launch()
    assert (launch.strategy.key, launch.strategy.engine, launch.parts) == (key, "fsdp1", parts)


def test_frozen_weights_have_no_gradient_and_no_state_of_the_optimizer():
    model = HopeForCausalLM(HopeConfig.from_preset("tiny", level_periods=[1]))
    launch, step = RUNNING["ddp"]().launch(), StepOptions(batch_size=2, block_size=64)
    whole, of_model = plan_running(model, launch, step, per_node=1), model.num_parameters()
    add_lora(model, rank=2, alpha=4, base="base")
    planned = plan_running(model, launch, step, per_node=1)
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    assert 0 < trained < of_model / 10
    assert (planned.saved, planned.weights) == (4 * trained, 4 * (of_model + trained))
    assert (whole.optimizer, planned.optimizer) == (8 * of_model, 8 * trained)
    # A run of frozen weights keeps fewer activations than are counted.
    assert planned.is_estimate and not whole.is_estimate
    # Gradients, their copies in buckets and Adam's moments of all weights, against the matrices of LoRA.
    assert whole.peak - planned.peak > 12 * (of_model - trained) - 4 * trained
