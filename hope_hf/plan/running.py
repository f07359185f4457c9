"""The arithmetic for a run that has started: what `run_clm.py --dry_run` asks."""

from dataclasses import dataclass

from accelerate import Accelerator
from accelerate.utils import DistributedType

from .memory import Memory, memory
from .shapes import shapes_of
from .states import level_periods, optimizer_bytes
from .step import StepOptions
from .strategy import STRATEGIES, UNSHARDED, Launch, Strategy, fsdp, zero


@dataclass(frozen=True)
class Planned:
    """Bytes.

    Attributes:
        memory: of the process with the largest part.
        weights: of the whole model, in fp32.
        optimizer: of the whole optimizer state.
        is_shared_out: whether processes hold parts of any of these.
    """

    memory: Memory
    weights: int
    optimizer: int
    is_shared_out: bool


def plan_running(config, accelerator: Accelerator, step: StepOptions, per_node: int) -> Planned:
    """The plan of a run under the engine of its Accelerator, with `per_node` processes on this machine."""
    launch, shapes = launch_of(accelerator, per_node), shapes_of(config, step.trust_remote_code)
    tokens = step.batch_size * step.block_size * step.accumulation * launch.world_size
    periods = level_periods(config)
    states = sum(weight.count * optimizer_bytes(weight, step.optimizer, periods, tokens) for weight in shapes.weights)
    found = memory(config, shapes, launch, step, per_node)
    return Planned(found, 4 * shapes.count, states, bool(launch.strategy.shared))


def launch_of(accelerator: Accelerator, per_node: int) -> Launch:
    """How an Accelerator shares a model out."""
    kinds = {DistributedType.FSDP: _fsdp, DistributedType.DEEPSPEED: _deepspeed}
    processes = accelerator.num_processes
    find = kinds.get(accelerator.distributed_type)
    strategy, parts, checkpointing = (STRATEGIES["ddp"], 1, False) if find is None else find(accelerator, per_node)
    return Launch(strategy, processes, parts, accelerator.mixed_precision, checkpointing)


def _fsdp(accelerator: Accelerator, per_node: int) -> tuple[Strategy, int, bool]:
    plugin, processes = accelerator.state.fsdp_plugin, accelerator.num_processes
    old = plugin.fsdp_version == 1
    named = plugin.sharding_strategy.name if old else None
    replicas = 1
    if accelerator.parallelism_config is not None:
        replicas = accelerator.parallelism_config.dp_replicate_size
    if named == "HYBRID_SHARD":
        replicas = processes // per_node
    if named == "NO_SHARD":
        return UNSHARDED, 1, plugin.activation_checkpointing
    keeps = named == "SHARD_GRAD_OP" if old else not plugin.reshard_after_forward
    # Version 1 has an object with a switch, version 2 one of two classes.
    offloads = getattr(plugin.cpu_offload, "offload_params", hasattr(plugin.cpu_offload, "pin_memory"))
    return fsdp(old, keeps, replicas, offloads), processes // replicas, plugin.activation_checkpointing


def _deepspeed(accelerator: Accelerator, per_node: int) -> tuple[Strategy, int, bool]:
    config = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
    devices = [config.get(f"offload_{name}", {}).get("device") for name in ("optimizer", "param")]
    return zero(config["stage"], *(device == "cpu" for device in devices)), accelerator.num_processes, False
