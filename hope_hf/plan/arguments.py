"""Flags of `python -m hope_hf.plan`. It reads the recipes of `run_clm.py`, so its flags have the same names."""

from dataclasses import Field, dataclass, field, fields, make_dataclass
from typing import Literal

from hope_hf.cli.flags import COUNT, flag
from hope_hf.step.arguments import Arguments as RunFlags

MOST_TOKENS = 10**16
MOST_PROCESSES = 65_536
# Flags of `run_clm.py` on which a step's memory depends.
SHARED = (
    "block_size per_device_train_batch_size gradient_accumulation_steps sync_each_batch gradient_checkpointing "
    "optimizer fsdp_reduce_dtype".split()
)


@dataclass
class SubjectArguments:
    """Which model. Without any of them: a HOPE of the size `tiny`."""

    _argument_group_name = "model"

    model_name_or_path: str | None = flag(None, "Folder or Hub name of a saved model; only its config is read.")
    model_type: str | None = flag(None, "Architecture: hope (default) or any other causal LM of transformers.")
    config_name: str | None = flag(None, "Config: folder, Hub name, or HOPE size (tiny, pilot, mid, target).")
    config_overrides: str | None = flag(
        None, "Fields of the config: 'hidden_size=256,num_hidden_layers=4' or a JSON object."
    )
    trust_remote_code: bool = flag(False, "Allow model code from the Hub to run on this machine.")
    attn_implementation: str | None = flag(None, "Attention kernel of the simulation: sdpa (for flash, too), eager.")


@dataclass
class LaunchArguments:
    """How the run is launched."""

    accelerate_config: str | None = flag(None, "Launch file, such as accelerate_configs/fsdp2.yaml (default: DDP).")
    world_size: int | None = flag(
        None, "Processes, one per GPU (default: the launch file's).", least=1, most=MOST_PROCESSES
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = flag(None, "Mixed precision (default: the launch file's).")


def _of_the_run(name: str) -> tuple[str, object, Field]:
    """A flag of `run_clm.py`, as it is defined there."""
    own = RunFlags.__dataclass_fields__[name]
    return name, own.type, field(default=own.default, metadata=own.metadata)


@dataclass
class StepArguments(make_dataclass("SharedFlags", map(_of_the_run, SHARED), bases=(LaunchArguments,))):
    """One optimizer step."""

    _argument_group_name = "step"


@dataclass
class MachineArguments:
    """The machines, the length of the run, and what is printed."""

    _argument_group_name = "machine"

    gpu: str = flag("h100-80gb", "Comma-separated GPUs: h100-80gb, a100-40gb, ...")
    gpus_per_node: int = flag(8, "GPUs of one machine, joined by NVLink.", least=1, most=1024)
    network_gbit: float = flag(200.0, "Gbit/s of each GPU's link to other machines.", least=1e-3)
    max_train_steps: int | None = flag(None, "Optimizer steps of the whole run: adds days.", **COUNT)
    total_tokens: float | None = flag(
        None, "Tokens of the whole run, such as 30e9, instead of its steps.", least=1, most=MOST_TOKENS
    )
    mfu: float = flag(
        0.4, "Share of the GPU's peak FLOP/s that the run reaches (train/mfu_percent / 100).", least=1e-6, most=1
    )
    price_per_gpu_hour: float | None = flag(None, "Adds the cost of the run, in the same currency.", above=0)
    simulate: bool = flag(True, "Also run the step on fake tensors; --no_simulate: arithmetic only.")
    json: bool = flag(False, "Print one JSON object instead of the table.")
    plot: str | None = flag(None, "Also draw the settings' memory as bars into this .png.")


@dataclass
class Arguments(SubjectArguments, StepArguments, MachineArguments):
    """All flags of a plan, flat."""

    _argument_group_name = None


GROUPS = (SubjectArguments, StepArguments, MachineArguments)
FLAGS = tuple(f.name for group in GROUPS for f in fields(group))
