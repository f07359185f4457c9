"""The ways to share a model out over processes: what each holds, and how an accelerate launch file names them."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hope_hf.step.launch_file import LOW_PRECISION
from hope_hf.step.launch_file import read as read_content
from hope_hf.step.recompute import parse_recomputed

from .arguments import MOST_PROCESSES

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ALL = frozenset((WEIGHTS, GRADIENTS, OPTIMIZER))


@dataclass(frozen=True)
class Strategy:
    """What every process holds a part of.

    Attributes:
        key: its name in tables and in `--json`.
        engine: "plain" (one process, DDP), "fsdp2", "fsdp1" or "deepspeed".
        shared: which of `WEIGHTS`, `GRADIENTS` and `OPTIMIZER` are cut into parts.
        keeps_gathered: whether gathered weights stay from forward to backward (SHARD_GRAD_OP).
        is_hybrid: shared out inside a machine, replicated over machines.
        offloads: the kinds that lie in the machine's memory instead of the GPU's.
        launch_file: of `accelerate_configs/`; None where no engine here does it.
    """

    key: str
    engine: str
    shared: frozenset[str] = frozenset()
    keeps_gathered: bool = False
    is_hybrid: bool = False
    offloads: frozenset[str] = frozenset()
    launch_file: str | None = None

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered block by block."""
        return WEIGHTS in self.shared


STRATEGIES = {
    strategy.key: strategy
    for strategy in (
        Strategy("ddp", "plain", launch_file="ddp.yaml"),
        # Of the literature; DeepSpeed has it, the engines here begin with stage 2.
        Strategy("zero1", "deepspeed", frozenset((OPTIMIZER,))),
        Strategy("zero2", "deepspeed", frozenset((GRADIENTS, OPTIMIZER)), launch_file="deepspeed_zero2.yaml"),
        Strategy("zero3", "deepspeed", ALL, launch_file="deepspeed_zero3.yaml"),
        Strategy("shard_grad_op", "fsdp2", ALL, keeps_gathered=True, launch_file="fsdp2.yaml"),
        Strategy("full_shard", "fsdp2", ALL, launch_file="fsdp2.yaml"),
        Strategy("hybrid_shard", "fsdp2", ALL, is_hybrid=True, launch_file="fsdp_hybrid.yaml"),
        Strategy("fsdp_offload", "fsdp2", ALL, offloads=ALL, launch_file="fsdp_offload.yaml"),
        Strategy("zero3_offload", "deepspeed", ALL, offloads=ALL, launch_file="deepspeed_zero3_offload.yaml"),
    )
}
# Version 1 of FSDP with the strategy NO_SHARD.
UNSHARDED = replace(STRATEGIES["ddp"], engine="fsdp1")
# Added to the key of a strategy where it is not enough to name the launch file.
SETTINGS = {"shard_grad_op": "with fsdp_reshard_after_forward: false"}


@dataclass(frozen=True)
class Launch:
    """A strategy on a number of processes.

    Attributes:
        world_size: processes.
        parts: processes that share out one replica.
        precision: accelerate's mixed precision: "no", "bf16" or "fp16".
        checkpointing: whether the launch file asks that blocks are recomputed.
    """

    strategy: Strategy
    world_size: int
    parts: int
    precision: str = "no"
    checkpointing: bool = False

    @property
    def replicas(self) -> int:
        return self.world_size // self.parts

    @property
    def compute_bytes(self) -> int:
        """Per gathered weight. DeepSpeed in bf16 gathers fp32 weights, which autocast rounds."""
        wide = self.precision == "no" or (self.strategy.engine == "deepspeed" and self.precision == "bf16")
        return 4 if wide else 2

    def whole_gradients(self, reduce_dtype: torch.dtype) -> torch.dtype | None:
        """In which dtype FSDP adds up the gradients of the whole model between accumulated batches.

        None where a process adds up only the gradients that it keeps. `reduce_dtype`: of the sum over processes.
        """
        if not (self.strategy.engine.startswith("fsdp") and self.strategy.gathers):
            return None
        if self.precision == "no":
            return torch.float32
        # Version 1 adds gradients up as they were computed, version 2 as it sums them over processes.
        return LOW_PRECISION[self.precision] if self.strategy.engine == "fsdp1" else reduce_dtype

    def recomputes(self, flag: str) -> str:
        """`--gradient_checkpointing`; where it says none, what the launch file asks for."""
        return "block" if self.checkpointing and parse_recomputed(flag).part == "none" else flag

    def under(self, strategy: Strategy, per_node: int) -> "Launch":
        """The same processes under another strategy; a hybrid shares out inside nodes of `per_node` processes."""
        parts = 1 if not strategy.shared else self.world_size
        if strategy.is_hybrid:
            parts = self.parts if self.strategy.is_hybrid else min(per_node, self.world_size)
        return replace(self, strategy=strategy, parts=parts)


@dataclass(frozen=True)
class StepOptions:
    """The flags of `run_clm.py` on which a step's memory depends."""

    batch_size: int
    block_size: int
    accumulation: int = 1
    checkpointing: str = "none"
    optimizer: str = "adamw"
    sync_each_batch: bool = False
    reduce_dtype: torch.dtype = torch.float32
    attn_implementation: str | None = None
    trust_remote_code: bool = False


def read_launch_file(path: str | None, world_size: int | None, gradient_accumulation_steps: int) -> Launch:
    """The launch that a file asks for; one process or DDP without a file.

    `world_size`: `--world_size`, or None for the file's. Raises ValueError with one sentence that names the file or
    flag.
    """
    if path is None:
        processes = world_size or 1
        return Launch(STRATEGIES["ddp"], processes, 1)
    content = read_content(Path(path), f"--accelerate_config {path}")
    processes = world_size or int(content.get("num_processes") or 1)
    if not 1 <= processes <= MOST_PROCESSES:
        raise ValueError(
            f"--accelerate_config {path}: num_processes is {processes}: write a whole number from 1 to "
            f"{MOST_PROCESSES:,}."
        )
    kind = str(content.get("distributed_type") or "NO")
    known = {"NO": _plain, "MULTI_GPU": _plain, "MULTI_CPU": _plain, "FSDP": _fsdp, "DEEPSPEED": _deepspeed}
    if kind not in known:
        raise ValueError(
            f"--accelerate_config {path}: distributed_type is {kind}: write one of {', '.join(known)}."
        )
    if kind == "NO" and processes > 1:
        raise ValueError(
            f"--accelerate_config {path} starts one process and --world_size is {processes}: take "
            "accelerate_configs/ddp.yaml or fsdp2.yaml, or leave --world_size out."
        )
    precision = str(content.get("mixed_precision") or "no")
    # YAML 1.1 reads a plain no as false.
    precision = "no" if precision == "False" else precision
    if precision not in ("no", "bf16", "fp16"):
        raise ValueError(f"--accelerate_config {path}: mixed_precision is {precision}: write 'no', bf16 or fp16.")
    strategy, parts, checkpointing = known[kind](path, content, processes, gradient_accumulation_steps)
    return Launch(strategy, processes, parts, precision, checkpointing)


def _plain(path, content, processes, accumulation) -> tuple[Strategy, int, bool]:
    return STRATEGIES["ddp"], 1, False


def _fsdp(path, content, processes, accumulation) -> tuple[Strategy, int, bool]:
    config = content.get("fsdp_config") or {}
    if processes < 2:
        raise ValueError(
            f"--accelerate_config {path} asks for FSDP, which needs two processes or more: raise --world_size, or "
            "take accelerate_configs/single.yaml."
        )
    old = config.get("fsdp_version") == 1
    named = str(config.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    # By name, or by number as accelerate's wizard once wrote it.
    numbers = dict(zip("12345", ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID"), strict=True))
    named = numbers.get(named, named)
    if old and named not in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"):
        raise ValueError(
            f"--accelerate_config {path}: fsdp_sharding_strategy {named} is not planned: write FULL_SHARD, "
            "SHARD_GRAD_OP, HYBRID_SHARD or NO_SHARD."
        )
    keeps = named == "SHARD_GRAD_OP" if old else not _is_true(config.get("fsdp_reshard_after_forward", True))
    replicas, parts = _mesh(path, content, processes)
    if old and named == "HYBRID_SHARD":
        machines = int(content.get("num_machines") or 1)
        replicas, parts = machines, processes // machines
        if machines * parts != processes:
            raise ValueError(
                f"--accelerate_config {path} has {machines} machines, among which {processes} processes cannot be "
                "divided: change num_machines or --world_size."
            )
    if old and named == "NO_SHARD":
        strategy, parts = UNSHARDED, 1
    else:
        strategy = fsdp_strategy(old, keeps, replicas, _is_true(config.get("fsdp_offload_params", False)))
    return strategy, parts, _is_true(config.get("fsdp_activation_checkpointing", False))


def fsdp_strategy(old: bool, keeps_gathered: bool, replicas: int, offloads: bool) -> Strategy:
    """FSDP, of version 1 if `old`."""
    key = "hybrid_shard" if replicas > 1 else "shard_grad_op" if keeps_gathered else "full_shard"
    strategy = STRATEGIES["fsdp_offload" if offloads else key]
    engine = "fsdp1" if old else "fsdp2"
    return replace(strategy, keeps_gathered=keeps_gathered, is_hybrid=replicas > 1, engine=engine)


def _mesh(path, content, processes) -> tuple[int, int]:
    """Replicas, and processes that share one out."""
    mesh = content.get("parallelism_config") or {}
    replicas = int(mesh.get("parallelism_config_dp_replicate_size") or 1)
    parts = int(mesh.get("parallelism_config_dp_shard_size") or 1)
    if replicas * parts == 1:
        return 1, processes
    if replicas * parts != processes:
        raise ValueError(
            f"--accelerate_config {path} makes a mesh of {replicas} x {parts} processes and --world_size is "
            f"{processes}: change one of them."
        )
    return replicas, parts


def _deepspeed(path, content, processes, accumulation) -> tuple[Strategy, int, bool]:
    config = content.get("deepspeed_config") or {}
    if "deepspeed_config_file" in config:
        raise ValueError(
            f"--accelerate_config {path} names a DeepSpeed json, which is not planned: write zero_stage and "
            "offload_optimizer_device into deepspeed_config instead."
        )
    given = config.get("gradient_accumulation_steps", "auto")
    if given != "auto" and int(given) != accumulation:
        raise ValueError(
            f"--accelerate_config {path} has gradient_accumulation_steps {given} and the flag is {accumulation}: "
            "leave the key out."
        )
    stage = int(config.get("zero_stage", 2))
    optimizer, weights = (config.get(f"offload_{name}_device") == "cpu" for name in ("optimizer", "param"))
    return zero_strategy(stage, optimizer, weights), processes, False


def zero_strategy(stage: int, offloads_optimizer: bool, offloads_weights: bool) -> Strategy:
    """DeepSpeed's stage; it offloads weights in stage 3 alone."""
    offloads = {OPTIMIZER, GRADIENTS} if offloads_optimizer else set()
    if offloads_weights and stage == 3:
        offloads |= {WEIGHTS}
    strategy = STRATEGIES["zero3_offload" if offloads and stage == 3 else f"zero{stage}"]
    return replace(strategy, offloads=frozenset(offloads))


def _is_true(value) -> bool:
    return str(value).lower() == "true"
