"""Flags of `hope-hf plan`, named as in the recipes of `hope-hf train`, and the `Question` they describe."""

import os
from dataclasses import Field, dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from typing import Literal

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hope_hf import PRESETS
from hope_hf.common.defaults import VOCAB_SIZE, Default, defaults_of
from hope_hf.common.flags import COUNT, flag
from hope_hf.common.gpus import Gpu, parse_gpus
from hope_hf.common.models import DEFAULT_PRESET, build_config, load_config, named_vocabulary
from hope_hf.common.parser import Parser, named_flags
from hope_hf.common.process import warn_once
from hope_hf.common.recipe import replaced, without
from hope_hf.common.recompute import Recomputed, parse_recomputed
from hope_hf.common.run_arguments import LONGEST_DEFAULT_BLOCK, check_block_size
from hope_hf.common.run_arguments import Arguments as RunFlags
from hope_hf.common.run_recipe import split_run_recipe
from hope_hf.optim import RULES

from .launch import MOST_PROCESSES, Launch, StepOptions, read_launch_file
from .memory import Memory, memory
from .shapes import Shapes, shapes_of

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
    simulate: bool = flag(True, "Also run the step on fake tensors; --no_simulate: arithmetic only.")
    json: bool = flag(False, "Print one JSON object instead of the table.")
    plot: str | None = flag(None, "Also draw the settings' memory as bars into this .png.")


@dataclass
class Arguments(SubjectArguments, StepArguments, RunTextArguments, MachineArguments):
    """All flags of a plan, flat."""

    _argument_group_name = None


GROUPS = (SubjectArguments, StepArguments, RunTextArguments, MachineArguments)
FLAGS = tuple(f.name for group in GROUPS for f in fields(group))
SHAPES_A_MODEL = {"model_type", "config_name", "config_overrides"}


@dataclass(frozen=True)
class Question:
    """A run to plan."""

    args: Arguments
    config: object
    shapes: Shapes
    launch: Launch
    step: StepOptions
    gpus: list[Gpu]
    defaults: dict[str, Default]
    """By flag, what the size of the text chose."""

    def memory(self, launch: Launch, step: StepOptions) -> Memory:
        """The arithmetic of this model under another launch or step."""
        return memory(self.config, self.shapes, launch, step, self.args.gpus_per_node)

    @property
    def network(self) -> float:
        """Bytes per second of the link between machines."""
        return self.args.network_gbit / 8 * 1e9

    @property
    def tokens_per_step(self) -> int:
        """See `StepOptions.tokens`."""
        return self.step.tokens(self.launch.world_size)

    @property
    def total_tokens(self) -> float | None:
        """Tokens of the whole run; None if no flag gives its length."""
        if self.args.total_tokens is not None or self.args.max_train_steps is None:
            return self.args.total_tokens
        return self.args.max_train_steps * self.tokens_per_step


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


def parse(argv: list[str]) -> Question:
    """Read `[recipe.yaml] --flag value ...`; the planner ignores keys of the recipe that are not its flags.

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
    groups = parser.parse_args_into_dataclasses(recipe + argv, look_for_args_file=False)
    values = {}
    for group in groups:
        for option in fields(group):
            values[option.name] = getattr(group, option.name)
    args = Arguments(**values)
    gpus = parse_gpus(args.gpu)
    _check_plot(args.plot)
    launch = read_launch_file(args.accelerate_config, args.world_size, args.gradient_accumulation_steps)
    if args.mixed_precision:
        launch = replace(launch, precision=args.mixed_precision)
    _warn_of_ignored(args, named, launch)
    config = _config(args)
    defaults: dict[str, Default] = {}
    # A recipe names the values that it wants.
    if args.train_file and not recipe and not args.model_name_or_path:
        if named_vocabulary(args.config_overrides):
            named = named | {VOCAB_SIZE}
        defaults = _defaults(args, config, named)
        if args.tokenizer_name is None and VOCAB_SIZE not in named:
            config.vocab_size = _vocabulary_of_text(defaults)
        values = {name: default.value for name, default in defaults.items() if name in FLAGS}
        args = replace(args, **values)
    # Flash attention needs a GPU and its package; sdpa keeps as many bytes.
    attention = None if "flash" in (args.attn_implementation or "") else args.attn_implementation
    step = StepOptions.of(args, _block_size(args, config), attention)
    step = replace(step, checkpointing=_recomputed(args, launch))
    if RULES[args.optimizer].needs_matrices and launch.strategy.engine in ("fsdp1", "deepspeed"):
        raise ValueError(
            f"--optimizer {args.optimizer} needs whole matrices and {args.accelerate_config} cuts them anywhere: plan "
            "with accelerate_configs/fsdp2.yaml or ddp.yaml, or --optimizer adamw."
        )
    return Question(args, config, shapes_of(config, args.trust_remote_code), launch, step, gpus, defaults)


def _defaults(args: Arguments, config, named: set[str]) -> dict[str, Default]:
    """The defaults for the size of the text, of flags on which a plan depends and that are not among `named`."""
    # Imported here: data sets take seconds.
    from hope_hf.data import size_of_files

    size = size_of_files(args.train_file, "--train_file")
    defaults = defaults_of(size, getattr(config, "hidden_size", 0), named)
    return {name: default for name, default in defaults.items() if name in (*SHARED, VOCAB_SIZE)}


def _vocabulary_of_text(defaults: dict[str, Default]) -> int:
    """The entries of the tokenizer that a run makes from its text."""
    from hope_hf.data import DEFAULT_VOCAB_SIZE

    return defaults[VOCAB_SIZE].value if VOCAB_SIZE in defaults else DEFAULT_VOCAB_SIZE


def _recomputed(args: Arguments, launch: Launch) -> str:
    recomputed = parse_recomputed(args.gradient_checkpointing)
    if launch.checkpointing and recomputed.part != "none":
        warn_once("fsdp_activation_checkpointing in the launch file is ignored: --gradient_checkpointing decides.")
    return "block" if recomputed == Recomputed("block") else launch.recomputes(args.gradient_checkpointing)


def _config(args: Arguments):
    if args.model_name_or_path:
        for flag_of_new_model in sorted(SHAPES_A_MODEL):
            if getattr(args, flag_of_new_model):
                raise ValueError(
                    f"--{flag_of_new_model} shapes a new model and --model_name_or_path names one: give only one."
                )
        config = load_config(args.model_name_or_path, "model_name_or_path", args)
    else:
        # Without a tokenizer the vocabulary is the config's own.
        config = build_config(args, None, _vocabulary(args), PRESETS)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise ValueError(f"--model_type {config.model_type} has no vocab_size: it is not a plain causal LM.")
    return config


def _vocabulary(args: Arguments) -> int:
    size = named_vocabulary(args.config_overrides)
    if size is not None:
        return size
    name = args.config_name
    kind = args.model_type or "hope"
    if name in PRESETS or (name is None and kind == "hope"):
        size = PRESETS[name or DEFAULT_PRESET].get("vocab_size")
    elif name is not None and os.path.isdir(name):
        size = getattr(load_config(name, "config_name", args), "vocab_size", None)
    # `build_config` refuses unknown names.
    elif name is None and kind in CONFIG_MAPPING:
        size = getattr(AutoConfig.for_model(kind), "vocab_size", None)
    return size or 32_000


def _block_size(args: Arguments, config) -> int:
    if args.block_size is None:
        return min(LONGEST_DEFAULT_BLOCK, getattr(config, "max_position_embeddings", None) or LONGEST_DEFAULT_BLOCK)
    check_block_size(args.block_size, config)
    return args.block_size


def _check_plot(path: str | None):
    if path is None:
        return
    if not path.endswith(".png"):
        raise ValueError(f"--plot {path} is not a .png: name a picture, such as plan.png.")
    if not Path(path).parent.is_dir():
        raise ValueError(f"--plot {path} cannot be written: name a file in a folder that exists.")


def _warn_of_ignored(args: Arguments, named: set[str], launch: Launch):
    fsdp = launch.strategy.is_fsdp
    mixed = launch.precision != "no"
    endless = args.total_tokens is None and args.max_train_steps is None
    for name, is_ignored, reason in (
        ("price_per_gpu_hour", endless, "neither --max_train_steps nor --total_tokens is given"),
        ("max_train_steps", args.total_tokens is not None, "--total_tokens is given"),
        ("sync_each_batch", not fsdp or args.gradient_accumulation_steps == 1, "FSDP accumulates no batches"),
        ("fsdp_reduce_dtype", not (fsdp and mixed), "the launch file does not ask for FSDP with bf16 or fp16"),
        ("attn_implementation", not args.simulate, "--no_simulate is given"),
    ):
        if name in named and is_ignored:
            warn_once(f"--{name} is ignored: {reason}.")
