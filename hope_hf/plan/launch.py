"""How a model is divided among processes: strategies, a launch, and the launch that an accelerate file describes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from hope_hf.common.launch_file import read as read_content
from hope_hf.common.packaged import LAUNCH_FILES, find_file
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.recompute_flag import parse_recomputed

from .flags import MOST_PROCESSES

WEIGHTS, GRADIENTS, OPTIMIZER = "weights", "gradients", "optimizer"
ALL = frozenset((WEIGHTS, GRADIENTS, OPTIMIZER))


@dataclass(frozen=True)
class Strategy:
    """What is sharded, into one part per process.

    Attributes:
        key: the name in tables and in `--json`.
        engine: "plain" (one process, DDP), "fsdp2", "fsdp1" or "deepspeed".
        shared: which of `WEIGHTS`, `GRADIENTS` and `OPTIMIZER` are sharded.
        keeps_gathered: whether gathered weights are kept from forward to backward (SHARD_GRAD_OP).
        is_hybrid: whether each machine holds a replica, sharded over the processes of the machine.
        offloads: which of the three are held in the machine's memory instead of the GPU's.
        launch_file: a file of `accelerate_configs/`; None if no engine of this project has the strategy.
    """

    key: str
    engine: str
    shared: frozenset[str] = frozenset()
    keeps_gathered: bool = False
    is_hybrid: bool = False
    offloads: frozenset[str] = frozenset()
    launch_file: str | None = None

    @property
    def is_fsdp(self) -> bool:
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def gathers(self) -> bool:
        """Whether weights are gathered block by block."""
        return WEIGHTS in self.shared


STRATEGIES = {
    strategy.key: strategy
    for strategy in (
        Strategy("ddp", "plain", launch_file="ddp.yaml"),
        # Stage 1 is in the literature only; this project's engines begin with stage 2.
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
VERSION_1 = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
"""Strategies of FSDP's version 1, in the order of accelerate's numbers, which begin with 1."""
# FSDP version 1 with NO_SHARD.
UNSHARDED = replace(STRATEGIES["ddp"], engine="fsdp1")
# Settings that the launch file needs in addition.
SETTINGS = {"shard_grad_op": "with fsdp_reshard_after_forward: false"}


@dataclass(frozen=True)
class Mode:
    """How a model computes.

    Attributes:
        precision: accelerate's mixed precision: "no", "bf16" or "fp16".
        is_cast: whether its weights and the inputs of its blocks are cast (FSDP); otherwise autocast casts what
            matrices are multiplied with.
        on_cpu: whether on a CPU, by code that is compiled for it where there is a compiler.
    """

    precision: str
    is_cast: bool
    on_cpu: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the weights and inputs that are cast; None if none are."""
        return LOW_PRECISION.get(self.precision) if self.is_cast else None

    @property
    def low_bytes(self) -> int:
        """Bytes per number of what matrices are multiplied with."""
        return 4 if self.precision == "no" else 2


@dataclass(frozen=True)
class Launch:
    """A strategy on a number of processes.

    Attributes:
        world_size: number of processes.
        parts: number of processes among which one replica is divided.
        precision: accelerate's mixed precision: "no", "bf16" or "fp16".
        checkpointing: whether the launch file switches recomputed blocks on.
        on_cpu: whether the processes compute on CPUs, where HOPE's scan is compiled if there is a compiler.
    """

    strategy: Strategy
    world_size: int
    parts: int
    precision: str = "no"
    checkpointing: bool = False
    on_cpu: bool = False

    @property
    def replicas(self) -> int:
        return self.world_size // self.parts

    @property
    def mode(self) -> Mode:
        """How a process computes."""
        strategy = self.strategy
        is_deepspeed = strategy.engine == "deepspeed"
        casts = strategy.is_fsdp and strategy.gathers or is_deepspeed and self.precision == "fp16"
        is_cast = casts and self.precision != "no"
        return Mode(self.precision, is_cast, self.on_cpu)

    @property
    def compute_bytes(self) -> int:
        """Bytes per gathered weight. DeepSpeed in bf16 gathers fp32 weights, and autocast rounds them."""
        gathers_wide = self.strategy.engine == "deepspeed" and self.precision == "bf16"
        return 4 if self.precision == "no" or gathers_wide else 2

    def whole_gradients(self, reduce_dtype: torch.dtype) -> torch.dtype | None:
        """Dtype in which FSDP accumulates the gradients of the whole model between the batches of a step.

        None where each process accumulates its own part only. `reduce_dtype`: dtype of the sum over processes.
        """
        if not (self.strategy.is_fsdp and self.strategy.gathers):
            return None
        if self.precision == "no":
            return torch.float32
        # Version 1 accumulates in the compute dtype, version 2 in the dtype of the sum.
        return LOW_PRECISION[self.precision] if self.strategy.engine == "fsdp1" else reduce_dtype

    def recomputes(self, flag: str) -> str:
        """The value of `--gradient_checkpointing`, or the launch file's if the flag is `none`."""
        return "block" if self.checkpointing and parse_recomputed(flag).part == "none" else flag

    def under(self, strategy: Strategy, per_node: int) -> "Launch":
        """The same processes under another strategy; `per_node`: processes of a machine, for hybrids."""
        parts = 1 if not strategy.shared else self.world_size
        if strategy.is_hybrid:
            parts = self.parts if self.strategy.is_hybrid else min(per_node, self.world_size)
        return replace(self, strategy=strategy, parts=parts)


@dataclass(frozen=True)
class StepOptions:
    """The flags of `hope-hf train` on which a step's memory depends."""

    batch_size: int
    block_size: int
    accumulation: int = 1
    checkpointing: str = "none"
    optimizer: str = "adamw"
    sync_each_batch: bool = False
    reduce_dtype: torch.dtype = torch.float32
    attn_implementation: str | None = None
    trust_remote_code: bool = False

    def tokens(self, world_size: int) -> int:
        """Tokens of all processes and accumulated batches."""
        return self.batch_size * self.block_size * self.accumulation * world_size

    @classmethod
    def of(cls, args, block_size: int, attn_implementation: str | None = None) -> "StepOptions":
        """The options given by the flags of `hope-hf train` or of the planner, which have the same names."""
        return cls(
            args.per_device_train_batch_size,
            block_size,
            args.gradient_accumulation_steps,
            args.gradient_checkpointing,
            args.optimizer,
            args.sync_each_batch,
            getattr(torch, args.fsdp_reduce_dtype),
            attn_implementation,
            args.trust_remote_code,
        )


def fsdp_strategy(is_version_1: bool, keeps_gathered: bool, replicas: int, offloads: bool) -> Strategy:
    """FSDP; `keeps_gathered`: from forward to backward."""
    is_hybrid = replicas > 1
    key = "shard_grad_op" if keeps_gathered else "full_shard"
    if is_hybrid:
        key = "hybrid_shard"
    if offloads:
        key = "fsdp_offload"
    engine = "fsdp1" if is_version_1 else "fsdp2"
    return replace(STRATEGIES[key], keeps_gathered=keeps_gathered, is_hybrid=is_hybrid, engine=engine)


def zero_strategy(stage: int, offloads_optimizer: bool, offloads_weights: bool) -> Strategy:
    """A stage of DeepSpeed, which offloads weights in stage 3 only."""
    offloads = {OPTIMIZER, GRADIENTS} if offloads_optimizer else set()
    if offloads_weights and stage == 3:
        offloads |= {WEIGHTS}
    strategy = STRATEGIES["zero3_offload" if offloads and stage == 3 else f"zero{stage}"]
    return replace(strategy, offloads=frozenset(offloads))


def read_launch_file(path: str | None, world_size: int | None, gradient_accumulation_steps: int) -> Launch:
    """The launch that a file describes; without a file one process, or DDP.

    `world_size`: `--world_size`; None takes the file's number. Raises ValueError with one sentence that names the file
    or flag.
    """
    if path is None:
        return Launch(STRATEGIES["ddp"], world_size or 1, 1)
    content = read_content(Path(find_file(path, LAUNCH_FILES)), f"--accelerate_config {path}")

    def refuse(sentence: str):
        raise ValueError(f"--accelerate_config {path}{sentence}.")

    processes = world_size or int(content.get("num_processes") or 1)
    if not 1 <= processes <= MOST_PROCESSES:
        refuse(f": num_processes is {processes}: write a whole number from 1 to {MOST_PROCESSES:,}")
    precision = str(content.get("mixed_precision") or "no")
    # YAML 1.1 reads a plain no as false.
    precision = "no" if precision == "False" else precision
    if precision not in ("no", *LOW_PRECISION):
        refuse(f": mixed_precision is {precision}: write 'no', bf16 or fp16")
    kind = str(content.get("distributed_type") or "NO")
    if kind == "NO" and processes > 1:
        refuse(
            f" starts one process and --world_size is {processes}: take accelerate_configs/ddp.yaml or fsdp2.yaml, or "
            "leave --world_size out"
        )
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP", "DEEPSPEED"):
        refuse(f": distributed_type is {kind}: write one of NO, MULTI_GPU, MULTI_CPU, FSDP, DEEPSPEED")
    on_cpu = kind == "MULTI_CPU" or _is_true(content.get("use_cpu"))
    launch = Launch(STRATEGIES["ddp"], processes, 1, precision, on_cpu=on_cpu)
    if kind == "FSDP":
        launch = _fsdp(content, launch, refuse)
    if kind == "DEEPSPEED":
        launch = _deepspeed(content.get("deepspeed_config") or {}, launch, gradient_accumulation_steps, refuse)
    return launch


def _fsdp(content: dict, launch: Launch, refuse: Callable[[str], NoReturn]) -> Launch:
    config, processes = content.get("fsdp_config") or {}, launch.world_size
    if processes < 2:
        refuse(
            " asks for FSDP, which needs two processes or more: raise --world_size, or take "
            "accelerate_configs/single.yaml"
        )
    launch = replace(launch, checkpointing=_is_true(config.get("fsdp_activation_checkpointing")))
    offloads = _is_true(config.get("fsdp_offload_params"))
    mesh = content.get("parallelism_config") or {}
    replicas = int(mesh.get("parallelism_config_dp_replicate_size") or 1)
    parts = int(mesh.get("parallelism_config_dp_shard_size") or 1)
    if replicas * parts == 1:
        parts = processes
    elif replicas * parts != processes:
        refuse(f" makes a mesh of {replicas} x {parts} processes and --world_size is {processes}: change one of them")
    if config.get("fsdp_version") == 2:
        keeps_gathered = not _is_true(config.get("fsdp_reshard_after_forward", True))
        return replace(launch, strategy=fsdp_strategy(False, keeps_gathered, replicas, offloads), parts=parts)
    named = str(config.get("fsdp_sharding_strategy", "FULL_SHARD")).upper()
    # The file has the strategy's name, or its number as accelerate's wizard once wrote it.
    number = int(named) if named.isdecimal() else 0
    by_number = dict(enumerate(VERSION_1, start=1))
    named = by_number.get(number, named)
    if named not in VERSION_1:
        refuse(f": fsdp_sharding_strategy {named} is not planned: write one of {', '.join(VERSION_1)}")
    if named == "NO_SHARD":
        return replace(launch, strategy=UNSHARDED)
    if named == "HYBRID_SHARD":
        replicas = int(content.get("num_machines") or 1)
        parts = processes // replicas
        if replicas * parts != processes:
            refuse(
                f" has {replicas} machines, among which {processes} processes cannot be divided: change num_machines "
                "or --world_size"
            )
    strategy = fsdp_strategy(True, named == "SHARD_GRAD_OP", replicas, offloads)
    return replace(launch, strategy=strategy, parts=parts)


def _deepspeed(config: dict, launch: Launch, accumulation: int, refuse: Callable[[str], NoReturn]) -> Launch:
    if "deepspeed_config_file" in config:
        refuse(
            " names a DeepSpeed json, which is not planned: write zero_stage and offload_optimizer_device into "
            "deepspeed_config instead"
        )
    steps = config.get("gradient_accumulation_steps", "auto")
    if steps != "auto" and int(steps) != accumulation:
        refuse(f" has gradient_accumulation_steps {steps} and the flag is {accumulation}: leave the key out")
    stage = int(config.get("zero_stage", 2))
    offloads_optimizer = config.get("offload_optimizer_device") == "cpu"
    offloads_weights = config.get("offload_param_device") == "cpu"
    strategy = zero_strategy(stage, offloads_optimizer, offloads_weights)
    return replace(launch, strategy=strategy, parts=launch.world_size)


def _is_true(value) -> bool:
    return str(value).lower() == "true"
