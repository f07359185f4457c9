"""The `Question` that a command line of `hope-hf plan` asks: model, launch and step of a run."""

import os
from dataclasses import dataclass, replace

from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hope_hf import PRESETS
from hope_hf.common.defaults import VOCAB_SIZE, Default, defaults_of
from hope_hf.common.gpus import Gpu
from hope_hf.common.models import DEFAULT_PRESET, build_config, load_config
from hope_hf.common.overrides import named_vocabulary
from hope_hf.common.process import warn_once
from hope_hf.common.recompute_flag import Recomputed, parse_recomputed
from hope_hf.common.run_arguments import LONGEST_DEFAULT_BLOCK, check_block_size
from hope_hf.data import DEFAULT_VOCAB_SIZE, size_of_files
from hope_hf.optim import RULES

from .flags import FLAGS, SHARED, Arguments, Read, read_flags
from .launch import Launch, StepOptions, read_launch_file
from .memory import Memory, memory
from .shapes import Shapes, shapes_of


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
        """The memory of this model under another launch or step."""
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


def parse(argv: list[str]) -> Question:
    """The run that a command line asks for, see `read_flags`."""
    return question_of(read_flags(argv))


def question_of(read: Read) -> Question:
    """The run that flags ask for; ValueError with one sentence that names the flag or file and the fix."""
    args, named = read.args, read.named
    launch = read_launch_file(args.accelerate_config, args.world_size, args.gradient_accumulation_steps)
    if args.mixed_precision:
        launch = replace(launch, precision=args.mixed_precision)
    _warn_of_ignored(args, named, launch)
    config = _config(args)
    defaults: dict[str, Default] = {}
    # A recipe names the values that it wants.
    if args.train_file and not read.has_recipe and not args.model_name_or_path:
        if named_vocabulary(args.config_overrides):
            named = named | {VOCAB_SIZE}
        defaults = _defaults(args, config, named)
        if args.tokenizer_name is None and VOCAB_SIZE not in named:
            config.vocab_size = _vocabulary_of_text(defaults)
        for name in defaults.keys() & set(FLAGS):
            args = replace(args, **{name: defaults[name].value})
    # Flash attention needs a GPU and its package; sdpa keeps as many bytes.
    attention = None if "flash" in (args.attn_implementation or "") else args.attn_implementation
    step = StepOptions.of(args, _block_size(args, config), attention)
    step = replace(step, checkpointing=_recomputed(args, launch))
    cuts_anywhere = launch.strategy.engine in ("fsdp1", "deepspeed")
    if cuts_anywhere and RULES[args.optimizer].needs_matrices:
        raise ValueError(
            f"--optimizer {args.optimizer} needs whole matrices and {args.accelerate_config} cuts them anywhere: plan "
            "with accelerate_configs/fsdp2.yaml or ddp.yaml, or --optimizer adamw."
        )
    shapes = shapes_of(config, args.trust_remote_code)
    return Question(args, config, shapes, launch, step, read.gpus, defaults)


def _defaults(args: Arguments, config, named: set[str]) -> dict[str, Default]:
    """The defaults for the size of the text, of flags on which a plan depends and that are not among `named`."""
    size = size_of_files(args.train_file, "--train_file")
    width = getattr(config, "hidden_size", 0)
    defaults = defaults_of(size, width, named)
    of_plan = {}
    for name, default in defaults.items():
        if name in (*SHARED, VOCAB_SIZE):
            of_plan[name] = default
    return of_plan


def _vocabulary_of_text(defaults: dict[str, Default]) -> int:
    """The entries of the tokenizer that a run makes from its text."""
    return defaults[VOCAB_SIZE].value if VOCAB_SIZE in defaults else DEFAULT_VOCAB_SIZE


def _recomputed(args: Arguments, launch: Launch) -> str:
    recomputed = parse_recomputed(args.gradient_checkpointing)
    if launch.checkpointing and recomputed.part != "none":
        warn_once("fsdp_activation_checkpointing in the launch file is ignored: --gradient_checkpointing decides.")
    return "block" if recomputed == Recomputed("block") else launch.recomputes(args.gradient_checkpointing)


def _config(args: Arguments):
    if args.model_name_or_path:
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
        longest = getattr(config, "max_position_embeddings", None)
        return min(LONGEST_DEFAULT_BLOCK, longest or LONGEST_DEFAULT_BLOCK)
    check_block_size(args.block_size, config)
    return args.block_size


def _warn_of_ignored(args: Arguments, named: set[str], launch: Launch):
    is_fsdp = launch.strategy.is_fsdp
    # By flag, why it is ignored.
    reasons = {}
    if args.total_tokens is not None:
        reasons["max_train_steps"] = "--total_tokens is given"
    elif args.max_train_steps is None:
        reasons["price_per_gpu_hour"] = "neither --max_train_steps nor --total_tokens is given"
    if not is_fsdp or args.gradient_accumulation_steps == 1:
        reasons["sync_each_batch"] = "FSDP accumulates no batches"
    if not is_fsdp or launch.precision == "no":
        reasons["fsdp_reduce_dtype"] = "the launch file does not ask for FSDP with bf16 or fp16"
    for name, reason in reasons.items():
        if name in named:
            warn_once(f"--{name} is ignored: {reason}.")
