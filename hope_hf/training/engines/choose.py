"""Makes the engine that the launcher's environment selects, with its Accelerator.

accelerate decides the engine from that environment, and some wrong launches silently start something else (one process
instead of two, plain DDP instead of FSDP). This module stops them with an error.
"""

import datetime
import importlib.util
import os

import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from accelerate.utils import DistributedType, GradientAccumulationPlugin, InitProcessGroupKwargs

from hope_hf.common.launch_file import check_launch_file
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.process import first_line, warn_once

from .base import Engine, EngineOptions
from .cpu import cpu_accelerator, leave_out_communication
from .fsdp1 import FSDP1
from .fsdp2 import FSDP2
from .guard import OneSidedError, check_devices
from .meeting import long_waits_told, meeting_place
from .zero import Zero

# Prefix of the variables with which the launcher passes on a launch file's mesh.
MESH = "PARALLELISM_CONFIG"
ENGINE_TYPES = {"fsdp": DistributedType.FSDP, "deepspeed": DistributedType.DEEPSPEED}


def make_engine(options: EngineOptions, trackers: list[str]) -> Engine:
    """The engine that the launcher selected, with its Accelerator.

    Raises ValueError if separate runs or another engine started, or the processes do not connect.
    """
    check_launch_file()
    check_mesh()
    check_compiler()
    wanted = wanted_engine()
    if wanted == "deepspeed" and importlib.util.find_spec("deepspeed") is None:
        raise ValueError(
            "The launch file asks for DeepSpeed, which is not installed: pip install 'hope_hf[deepspeed]'."
        )
    accelerator = _make_accelerator(options, trackers, wanted)
    _check_accelerator(accelerator, wanted)
    check_devices(accelerator)
    _warn_of_ignored(options, wanted == "fsdp", accelerator)
    engine = _engine(wanted, accelerator, options)
    if options.init == "sharded" and not engine.fills_shards:
        reason = f"--init sharded needs FSDP or ZeRO-3, and {engine.name} runs"
        if not options.dry_run:
            raise ValueError(
                f"{reason}: launch with accelerate_configs/fsdp2.yaml (or another fsdp file, or "
                "deepspeed_zero3.yaml), or give --init whole."
            )
        warn_once(f"{reason}: this dry run is that of --init whole.")
    if options.save_sharded and not engine.shards_weights:
        warn_once(f"--save_sharded is ignored: no weights are shared out ({engine.name}).")
    if options.sync_each_batch:
        _reduce_each_batch(options, engine)
    return engine


def _make_accelerator(options: EngineOptions, trackers: list[str], wanted: str) -> Accelerator:
    timeout = datetime.timedelta(seconds=options.ddp_timeout)
    settings = {
        "kwargs_handlers": [InitProcessGroupKwargs(init_method=meeting_place(), timeout=timeout)],
        # The number alone would yield to the environment's ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
        "gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=options.gradient_accumulation_steps),
        "log_with": trackers or None,
        "project_dir": options.output_dir,
    }
    on_cpu = not torch.accelerator.is_available()
    if wanted == "deepspeed" and on_cpu:
        leave_out_communication()
    try:
        with long_waits_told(options.ddp_timeout):
            return cpu_accelerator(wanted, settings) if on_cpu else Accelerator(**settings)
    except torch.distributed.DistError as error:
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        raise OneSidedError(
            f"Rank {os.environ.get('RANK')} did not meet the others at {host}:{port} within "
            f"{options.ddp_timeout:g} s (--ddp_timeout): {first_line(error)}"
        ) from None


def _check_accelerator(accelerator: Accelerator, wanted: str) -> None:
    """ValueError if accelerate started something else than the launch file asks for."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world_size:
        raise ValueError(
            f"WORLD_SIZE is {world_size} but {accelerator.num_processes} process(es) train together: "
            "launch with accelerate_configs/ddp.yaml."
        )
    if accelerator.mixed_precision not in ("no", *LOW_PRECISION):
        raise ValueError(
            f"mixed_precision {accelerator.mixed_precision} is not supported: set 'no', bf16 or fp16 in the config."
        )
    if accelerator.mixed_precision == "fp16" and wanted != "deepspeed" and accelerator.scaler is None:
        # On other devices accelerate silently drops fp16.
        raise ValueError(
            f"mixed_precision fp16 needs a GPU and this process has {accelerator.device}: set 'no' or bf16 in the "
            "config."
        )
    runs = accelerator.distributed_type
    if wanted in ENGINE_TYPES and runs != ENGINE_TYPES[wanted]:
        raise ValueError(
            f"The launch file asks for {ENGINE_TYPES[wanted].value} and {runs.value} runs: launch at least two "
            "processes with it (--num_processes), or take accelerate_configs/single.yaml."
        )


def _engine(wanted: str, accelerator: Accelerator, options: EngineOptions) -> Engine:
    if wanted == "plain":
        engine = Engine(accelerator)
        engine.name = plain_name(accelerator.num_processes)
        return engine
    if wanted == "deepspeed":
        return Zero(accelerator, options)
    return FSDP2(accelerator, options) if accelerator.is_fsdp2 else FSDP1(accelerator, options)


def _reduce_each_batch(options: EngineOptions, engine: Engine) -> None:
    """`--sync_each_batch`: accelerate reduces gradients after every accumulated batch."""
    steps = options.gradient_accumulation_steps
    if steps > 1 and engine.whole_gradients is not None:
        # All Accelerators share this state.
        GradientState(GradientAccumulationPlugin(num_steps=steps, sync_each_batch=True))
        return
    if steps == 1:
        reason = "--gradient_accumulation_steps is 1"
    elif isinstance(engine, Zero):
        reason = "DeepSpeed reduces gradients after every batch in any case"
    else:
        reason = f"gradients are whole in any case ({engine.name})"
    warn_once(f"--sync_each_batch is ignored: {reason}.")


def plain_name(processes: int) -> str:
    """The run card's name of an engine with whole replicas."""
    if processes == 1:
        return Engine.name
    if "ACCELERATE_MIXED_PRECISION" in os.environ:
        return "DDP, whole model in each process"
    # torchrun, or a cluster's own launcher: they read no launch file
    return "DDP (FSDP, ZeRO: accelerate launch --config_file accelerate_configs/...)"


def _warn_of_ignored(options: EngineOptions, fsdp: bool, accelerator: Accelerator):
    mixed = accelerator.mixed_precision in LOW_PRECISION
    if fsdp and options.gradient_checkpointing != EngineOptions.gradient_checkpointing:
        plugin = accelerator.state.fsdp_plugin
        if plugin.activation_checkpointing:
            # Both together would recompute every block twice.
            warn_once("fsdp_activation_checkpointing in the launch file is ignored: --gradient_checkpointing decides.")
        plugin.activation_checkpointing = False
    for name, is_ignored, reason in (
        ("fsdp_prefetch", not fsdp, "the launch file asks for no FSDP"),
        ("fsdp_limit_all_gathers", not fsdp, "the launch file asks for no FSDP"),
        ("fsdp_reduce_dtype", not (fsdp and mixed), "the launch file does not ask for FSDP with bf16 or fp16"),
    ):
        if is_ignored and getattr(options, name) != getattr(EngineOptions, name):
            warn_once(f"--{name} is ignored: {reason}.")


def check_mesh() -> None:
    """ValueError if the launch file's mesh of replicas and shards is not as large as the number of processes."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    replicas, shards = (int(os.environ.get(f"{MESH}_DP_{axis}_SIZE") or 1) for axis in ("REPLICATE", "SHARD"))
    if replicas * shards not in (1, world_size):
        raise ValueError(
            f"The launch file makes a mesh of {replicas} x {shards} processes and {world_size} run: change "
            "parallelism_config_dp_replicate_size and parallelism_config_dp_shard_size, or --num_processes."
        )


def check_compiler() -> None:
    """ValueError if the launch file lets accelerate compile the whole model, which `--torch_compile` does by parts."""
    backend = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        raise ValueError(
            f"The launch file compiles the model (dynamo_backend {backend}): set it to 'NO', and give --torch_compile."
        )


def wanted_engine() -> str:
    """The engine that the launcher's environment selects: "fsdp", "deepspeed" or "plain" (single process, DDP)."""
    for name in ("fsdp", "deepspeed"):
        if os.environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true":
            return name
    return "plain"
