"""`--sync_each_batch`: which engines reduce gradients after every accumulated batch, and what the others say."""

import re
from types import SimpleNamespace

import pytest
import torch
from accelerate.state import GradientState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffload, ShardingStrategy

from hope_hf.common.run_arguments import Arguments
from hope_hf.training.engines.base import Engine
from hope_hf.training.engines.choose import _reduce_each_batch, plain_name
from hope_hf.training.engines.fsdp1 import FSDP1
from hope_hf.training.engines.zero import Zero

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def arguments(batches: int) -> Arguments:
    return Arguments(output_dir="a", sync_each_batch=True, gradient_accumulation_steps=batches)


def fsdp1(strategy: str, args: Arguments, offload: bool = False) -> FSDP1:
    plugin = SimpleNamespace(
        sharding_strategy=ShardingStrategy[strategy],
        use_orig_params=True,
        cpu_offload=CPUOffload(offload),
        activation_checkpointing=False,
    )
    accelerator = SimpleNamespace(
        device=torch.device("cuda"), num_processes=8, mixed_precision="bf16", distributed_type=DistributedType.FSDP,
        state=SimpleNamespace(fsdp_plugin=plugin),
    )  # fmt: skip
    return FSDP1(accelerator, args)


def ddp(args: Arguments) -> Engine:
    engine = Engine()
    engine.name = plain_name(2)
    return engine


ENGINES = {
    "single": lambda args: Engine(),
    "ddp": ddp,
    "deepspeed": lambda args: Zero.__new__(Zero),
    "no_shard": lambda args: fsdp1("NO_SHARD", args),
}


@pytest.mark.parametrize(
    ("engine", "batches", "reason"),
    [
        ("single", 4, r"gradients are whole in any case \(one process\)"),
        ("ddp", 4, r"gradients are whole in any case \(DDP"),
        ("no_shard", 4, r"gradients are whole in any case \(FSDP1 NO_SHARD\)"),
        ("deepspeed", 4, "DeepSpeed reduces gradients after every batch in any case"),
        ("single", 1, "--gradient_accumulation_steps is 1"),
    ],
)
def test_an_engine_without_whole_gradients_says_so_once(engine, batches, reason, recwarn):
    args = arguments(batches)
    _reduce_each_batch(args, ENGINES[engine](args))
    (said,) = [str(warning.message) for warning in recwarn]
    assert re.match(f"--sync_each_batch is ignored: {reason}", said)
    assert not GradientState().plugin_kwargs.get("sync_each_batch")


def test_a_sharding_engine_reduces_every_batch(recwarn):
    args = arguments(4)
    engine = fsdp1("FULL_SHARD", args)
    assert (engine.launch().parts, engine.whole_gradients) == (8, torch.bfloat16)
    _reduce_each_batch(args, engine)
    assert GradientState().plugin_kwargs == {"num_steps": 4, "sync_each_batch": True} and not recwarn.list


def test_offloaded_gradients_that_torch_cannot_add_up_are_refused():
    with pytest.raises(ValueError, match="--sync_each_batch: version 1 of FSDP cannot add up offloaded gradients"):
        fsdp1("FULL_SHARD", arguments(4), offload=True)
    fsdp1("FULL_SHARD", arguments(1), offload=True)
