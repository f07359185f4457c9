"""Flags of `hope-hf plan`, named as in the recipes of `hope-hf train`."""

from dataclasses import Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from hope_hf.common.flags import COUNT, flag, require_local
from hope_hf.common.gpus import Gpu, parse_gpus
from hope_hf.common.names import PRESETS
from hope_hf.common.overrides import named_vocabulary
from hope_hf.common.packaged import LAUNCH_FILES, find_file
from hope_hf.common.parser import Parser, named_flags, nearest
from hope_hf.common.recipe import read_yaml, replaced, without
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.common.run_arguments import Arguments as RunFlags
from hope_hf.common.run_recipe import split_run_recipe
from hope_hf.data import named_files

MOST_PROCESSES = 65_536
MOST_TOKENS = 10**16
# Flags of `hope-hf train` on which a step's memory depends.
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
    attn_implementation: str | None = flag(None, "Attention kernel that is planned: sdpa (for flash, too), eager.")


@dataclass
class LaunchArguments:
    """How the run is launched."""

    accelerate_config: str | None = flag(None, "Launch file, such as accelerate_configs/fsdp2.yaml (default: DDP).")
    world_size: int | None = flag(
        None, "Processes, one per GPU (default: the launch file's).", least=1, most=MOST_PROCESSES
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = flag(None, "Mixed precision (default: the launch file's).")


def _of_the_run(name: str) -> tuple[str, object, Field]:
    """A flag of `hope-hf train`, as it is defined there."""
    own = RunFlags.__dataclass_fields__[name]
    return name, own.type, field(default=own.default, metadata=own.metadata)


@dataclass
class StepArguments(make_dataclass("SharedFlags", map(_of_the_run, SHARED), bases=(LaunchArguments,))):
    """One optimizer step."""

    _argument_group_name = "step"


@dataclass
class RunTextArguments(make_dataclass("TextFlags", map(_of_the_run, ("train_file", "tokenizer_name")))):
    """The text of a new model without a recipe: its size sets the defaults, as in `run_clm.py`."""

    _argument_group_name = "text"


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
    simulate: bool = flag(False, "Also run the whole step on fake tensors, a check that takes minutes.")
    json: bool = flag(False, "Print one JSON object instead of the table.")
    plot: str | None = flag(None, "Also draw the settings' memory as bars into this .png.")


@dataclass
class Arguments(SubjectArguments, StepArguments, RunTextArguments, MachineArguments):
    """All flags of a plan, flat."""

    _argument_group_name = None


GROUPS = (SubjectArguments, StepArguments, RunTextArguments, MachineArguments)
FLAGS = tuple(f.name for group in GROUPS for f in fields(group))
SHAPES_A_MODEL = {"model_type", "config_name", "config_overrides"}


def make_parser() -> Parser:
    """All flags."""
    return Parser(
        GROUPS,
        prog="hope-hf plan",
        usage="%(prog)s [recipe.yaml] [flags]",
        description="Tell whether a run fits, and how long it takes. Command-line flags override the recipe.",
        example="hope-hf plan recipes/target.yaml --accelerate_config accelerate_configs/fsdp2.yaml --world_size 8",
        link="docs/distributed.md",
        allow_abbrev=False,
    )


class Read(NamedTuple):
    """What a command line says."""

    args: Arguments
    named: set[str]
    """The flags on the command line; those of the recipe are in `args` alone."""
    has_recipe: bool
    gpus: list[Gpu]


def read_flags(argv: list[str]) -> Read:
    """Read `[recipe.yaml] --flag value ...`, and look for the files that flags name.

    A new model on the command line replaces the weights that the recipe names. Raises ValueError with one sentence
    that names the flag or file and the fix.
    """
    recipe, argv = split_run_recipe(argv, FLAGS)
    parser = make_parser()
    named = named_flags(parser, argv, FLAGS)
    recipe = replaced(recipe, named)
    if named & SHAPES_A_MODEL:
        # The weights of a second phase may not exist yet: the first phase writes them.
        recipe = without(recipe, {"model_name_or_path"})
    values = {}
    for group in parser.parse_groups(recipe + argv):
        values |= vars(group)
    args = Arguments(**values)
    gpus = parse_gpus(args.gpu)
    _check(args, bool(recipe))
    return Read(args, named, bool(recipe), gpus)


def _check(args: Arguments, has_recipe: bool):
    """ValueError for mistakes that the flags alone show, and for files that do not exist."""
    _check_plot(args.plot)
    parse_recomputed(args.gradient_checkpointing)
    if args.accelerate_config is not None:
        # Its keys are checked later, with accelerate's own.
        read_yaml(find_file(args.accelerate_config, LAUNCH_FILES), f"--accelerate_config {args.accelerate_config}")
    if args.model_name_or_path:
        for flag_of_new_model in sorted(SHAPES_A_MODEL):
            if getattr(args, flag_of_new_model):
                raise ValueError(
                    f"--{flag_of_new_model} shapes a new model and --model_name_or_path names one: give only one."
                )
        require_local(args.model_name_or_path, "--model_name_or_path")
    elif args.config_name and args.config_name not in PRESETS and not nearest(args.config_name, PRESETS):
        require_local(args.config_name, "--config_name")
    named_vocabulary(args.config_overrides)
    # A recipe's text may be on another machine: its size decides nothing.
    if args.train_file and not has_recipe:
        named_files(args.train_file, "--train_file")


def _check_plot(path: str | None):
    if path is None:
        return
    if not path.endswith(".png"):
        raise ValueError(f"--plot {path} is not a .png: name a picture, such as plan.png.")
    if not Path(path).parent.is_dir():
        raise ValueError(f"--plot {path} cannot be written: name a file in a folder that exists.")
