"""Flags of `python -m hope_hf.plan`: those of the run are named as `run_clm.py` names them, whose recipes it reads."""

from dataclasses import dataclass, fields
from typing import Literal

from hope_hf.cli.flags import COUNT, LONGEST, ROWS, flag
from hope_hf.optim import RULES
from hope_hf.step.recompute import recomputing_flag

MOST_TOKENS = 10**16
MOST_PROCESSES = 65_536


@dataclass
class SubjectArguments:
    """Which model. Without any of them: a HOPE of the size `tiny`."""

    _argument_group_name = "model"

    model_name_or_path: str | None = flag(None, "Folder or Hub name of a saved model; its config alone is read.")
    model_type: str | None = flag(None, "Architecture: hope (default) or any other causal LM of transformers.")
    config_name: str | None = flag(None, "Config: folder, Hub name, or HOPE size (tiny, pilot, mid, target).")
    config_overrides: str | None = flag(
        None, "Fields of the config: 'hidden_size=256,num_hidden_layers=4' or a JSON object."
    )
    trust_remote_code: bool = flag(False, "Allow model code from the Hub to run on this machine.")
    attn_implementation: str | None = flag(None, "Attention kernel of the simulation: sdpa (for flash, too), eager.")


@dataclass
class StepArguments:
    """One optimizer step."""

    _argument_group_name = "step"

    accelerate_config: str | None = flag(None, "Launch file, as accelerate_configs/fsdp2.yaml (default: replicas).")
    world_size: int | None = flag(
        None, "Processes, one a GPU (default: the launch file's).", least=1, most=MOST_PROCESSES
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = flag(
        None, "As accelerate launch takes it (default: the launch file's)."
    )
    block_size: int | None = flag(
        None, "Tokens per row (default: the model's longest input, at most 1,024).", least=2, most=LONGEST
    )
    per_device_train_batch_size: int = flag(8, "Rows per process and forward pass.", **ROWS)
    gradient_accumulation_steps: int = flag(1, "Forward passes per optimizer step.", least=1, most=10_000)
    sync_each_batch: bool = flag(False, "FSDP: reduce gradients after each of them, so that none are held whole.")
    gradient_checkpointing: str = recomputing_flag()
    optimizer: Literal[tuple(RULES)] = flag("adamw", "Optimizer of hidden matrices; AdamW has the rest.")
    fsdp_reduce_dtype: Literal["float32", "bfloat16"] = flag(
        "float32", "FSDP in bf16 or fp16: in which dtype gradients are summed over processes."
    )


@dataclass
class MachineArguments:
    """What it runs on, for how long, and what is printed."""

    _argument_group_name = "machine"

    gpu: str = flag("h100-80gb", "GPUs with commas between them: h100-80gb, a100-40gb, ...")
    gpus_per_node: int = flag(8, "GPUs of one machine, joined by NVLink.", least=1, most=1024)
    network_gbit: float = flag(200.0, "Gbit/s of each GPU's link to other machines.", least=1e-3)
    max_train_steps: int | None = flag(None, "Optimizer steps of the whole run: adds days.", **COUNT)
    total_tokens: float | None = flag(
        None, "Tokens of the whole run, as 30e9, instead of its steps.", least=1, most=MOST_TOKENS
    )
    mfu: float = flag(
        0.4, "Share of the peak that the run reaches (train/mfu_percent / 100).", least=1e-6, most=1
    )
    price_per_gpu_hour: float | None = flag(None, "Adds the cost, in the same currency.", above=0)
    simulate: bool = flag(True, "Run the step on fake tensors as well; --no_simulate: arithmetic alone.")
    json: bool = flag(False, "Print one JSON object instead of the table.")
    plot: str | None = flag(None, "Also draw the settings' memory as bars into this .png.")


@dataclass
class Arguments(SubjectArguments, StepArguments, MachineArguments):
    """All flags of a plan, flat."""

    _argument_group_name = None


GROUPS = (SubjectArguments, StepArguments, MachineArguments)
FLAGS = tuple(f.name for group in GROUPS for f in fields(group))
