"""From a command line to `Arguments`: YAML file, flags that override it, one sentence for each mistake."""

import math
from dataclasses import fields, replace
from pathlib import Path

from hope_hf.common.defaults import VOCAB_SIZE, defaults_of
from hope_hf.common.flags import TEXT_SOURCES, check_output, check_repo_id, check_streaming, warn_of_text_flags
from hope_hf.common.launch_file import MICRO_BATCH, deepspeed_json
from hope_hf.common.overrides import named_vocabulary
from hope_hf.common.packaged import RECIPES, packaged_files
from hope_hf.common.parser import Parser, named_flags
from hope_hf.common.process import warn_once
from hope_hf.common.program import importing
from hope_hf.common.recipe import MODELS, read_recipe, replaced
from hope_hf.common.recompute_flag import parse_recomputed
from hope_hf.common.run_arguments import FLAGS, GROUPS, Arguments
from hope_hf.common.run_recipe import split_run_recipe

from .checkpoints.run_folder import saved_defaults
from .flag_values import parse_profiled, parse_settings, parse_stop_after
from .places import check_text_and_model

# Flags of a first day.
FIRST = (
    "output_dir", "train_file", "dataset_name", "config_name", "model_name_or_path", "tokenizer_name", "block_size",
    "per_device_train_batch_size", "learning_rate", "max_train_steps",
)  # fmt: skip
DEMO_RECIPE = packaged_files(RECIPES)["demo.yaml"]
# The default of transformers.
POLYNOMIAL_END = 1e-7
NAMES_DATA = {*TEXT_SOURCES, "validation_file"}


def parse(argv: list[str]) -> Arguments:
    """Read `[recipe.yaml] --flag value ...`; flags override the recipe, the recipe overrides the defaults.

    Flags that name another text or model replace all that the recipe sets for its own. Raises ValueError with one
    sentence that names the flag or file and the fix.
    """
    recipe, argv = split_run_recipe(argv)
    parser = Parser(
        GROUPS,
        prog="hope-hf train",
        usage="%(prog)s [recipe.yaml] --output_dir DIR [flags]",
        description="Train a causal language model in one process. Command-line flags override the recipe.\n"
        "Several: accelerate launch --config_file accelerate_configs/ddp.yaml -m hope_hf train [recipe.yaml] [flags]",
        example="hope-hf train recipes/demo.yaml --output_dir runs/demo",
        link="docs/running.md",
        first=FIRST,
        allow_abbrev=False,
    )
    recipe = replaced(recipe, named_flags(parser, argv, FLAGS))
    named = named_flags(parser, recipe + argv, FLAGS)
    demo = not named & {*MODELS, *NAMES_DATA}
    if demo:
        recipe = replaced(read_recipe(DEMO_RECIPE, FLAGS), named) + recipe
    groups = parser.parse_groups(recipe + argv)
    values = {f.name: getattr(group, f.name) for group in groups for f in fields(group)}
    args = Arguments(**values, demo=demo)
    _check(args)
    _warn_of_ignored(args, named)
    # A recipe names the values that it wants, and loaded weights are not trained as new ones.
    sources = [name for name in TEXT_SOURCES if getattr(args, name)]
    if sources == ["train_file"] and not recipe and not args.model_name_or_path:
        return _with_defaults(args, named)
    return args


def _with_defaults(args: Arguments, named: set[str]) -> Arguments:
    """The flags with the defaults of a text of this size in place of those that were not named."""
    defaults = saved_defaults(args.output_dir, args.resume_from_checkpoint)
    if defaults is None:
        check_text_and_model(args)
        # Not at the top, see `hope_hf.training.run`.
        with importing():
            from hope_hf import PRESETS
            from hope_hf.common.models import build_config
            from hope_hf.data import DEFAULT_VOCAB_SIZE, size_of_files

        vocab_size = named_vocabulary(args.config_overrides)
        config = build_config(args, None, vocab_size or DEFAULT_VOCAB_SIZE, PRESETS)
        decided = {
            VOCAB_SIZE: vocab_size is not None,
            "per_device_train_batch_size": deepspeed_json().get(MICRO_BATCH, "auto") != "auto",
        }
        named = named | {name for name, is_decided in decided.items() if is_decided}
        size = size_of_files(args.train_file, "--train_file")
        defaults = defaults_of(size, getattr(config, "hidden_size", 0), named)
    defaults = {name: default for name, default in defaults.items() if name not in named}
    flags = {name: default.value for name, default in defaults.items() if name in FLAGS}
    return replace(args, **flags, defaults=defaults)


def repo_id(args: Arguments) -> str:
    """The repository of `--push_to_hub`."""
    return args.hub_model_id or Path(args.output_dir).resolve().name


def _warn_of_ignored(args: Arguments, named: set[str]):
    names_text = any(getattr(args, source) for source in TEXT_SOURCES)
    ignored = (
        ("num_train_epochs", args.max_train_steps is not None, "--max_train_steps is given"),
        *((name, not names_text, "no flag names a text") for name in ("text_column", "on_bad_rows")),
        ("long_chats", not args.assistant_only_loss, "only chats (--assistant_only_loss) have it"),
        ("shuffle_buffer_size", not args.streaming, "only --streaming has one"),
        ("shuffle_buffer_size", args.document_boundary == "carry", "--document_boundary carry keeps the text's order"),
        ("lora_alpha", args.lora_rank is None, "--lora_rank is not given"),
        ("keep_every", not args.checkpointing_steps, "--checkpointing_steps is 0"),
        ("num_warmup_steps", args.lr_scheduler_type == "constant", "constant has none (constant_with_warmup has)"),
        ("run_name", args.report_to == "none", "--report_to names no tracker"),
        ("project_name", args.report_to == "none", "--report_to names no tracker"),
        ("hub_model_id", not args.push_to_hub, "--push_to_hub is not given"),
        ("hub_private_repo", not args.push_to_hub, "--push_to_hub is not given"),
    )
    if args.keep_every and args.checkpointing_steps and args.keep_every % args.checkpointing_steps:
        steps = math.lcm(args.keep_every, args.checkpointing_steps)
        warn_once(
            f"--keep_every {args.keep_every} keeps a checkpoint every {steps} steps: it is no multiple of "
            f"--checkpointing_steps {args.checkpointing_steps}."
        )
    if args.watchdog_seconds >= args.ddp_timeout:
        warn_once(
            f"--watchdog_seconds {args.watchdog_seconds:g} is not below --ddp_timeout {args.ddp_timeout:g}: a hang of "
            "several processes leaves no stacks."
        )
    for name, is_ignored, reason in ignored:
        if name in named and is_ignored:
            warn_once(f"--{name} is ignored: {reason}.")
    warn_of_text_flags(args, named)


def _check(args: Arguments):
    """ValueError for mistakes that the flags alone show."""
    if not args.output_dir:
        raise ValueError("--output_dir is missing: name a folder for the run.")
    check_output(args.output_dir, "--output_dir")
    parse_recomputed(args.gradient_checkpointing)
    named_vocabulary(args.config_overrides)
    if args.profile_steps is not None:
        parse_profiled(args.profile_steps)
    if args.stop_after is not None:
        parse_stop_after(args.stop_after)
    parse_settings(args.lr_scheduler_kwargs)
    if args.push_to_hub:
        check_repo_id(repo_id(args), "--hub_model_id")
    if args.push_to_hub and args.save_sharded:
        raise ValueError("--push_to_hub uploads whole weights and --save_sharded saves parts: give only one of them.")
    if args.model_name_or_path and (args.config_name or args.config_overrides or args.model_type):
        flag = next(n for n in ("config_name", "config_overrides", "model_type") if getattr(args, n))
        raise ValueError(f"--{flag} shapes a new model and --model_name_or_path loads one: give only one of them.")
    if args.lora_rank:
        _check_lora(args)
    if args.lr_scheduler_type == "polynomial" and args.learning_rate <= POLYNOMIAL_END:
        raise ValueError(
            f"--lr_scheduler_type polynomial ends at a rate of {POLYNOMIAL_END:g}: give a higher --learning_rate."
        )
    check_streaming(args)
    if args.ignore_data_skip:
        _check_data_skip(args)
    if args.streaming and args.max_train_steps is None:
        raise ValueError("--streaming has no known length: give --max_train_steps.")
    if args.dataset_name and args.validation_file:
        raise ValueError("--dataset_name and --validation_file exclude each other: give only one of them.")
    if args.validation_file and not args.train_file:
        raise ValueError("--validation_file needs --train_file.")


def _check_lora(args: Arguments):
    if not args.model_name_or_path:
        raise ValueError("--lora_rank adapts a trained model: name it with --model_name_or_path.")
    whole = {"train_only": "memories", "init": "sharded", "save_sharded": True, "push_to_hub": True}
    for name, value in whole.items():
        if getattr(args, name) == value:
            shown = f"--{name}" if value is True else f"--{name} {value}"
            raise ValueError(f"--lora_rank trains and saves an adapter alone: leave {shown} out.")


def _check_data_skip(args: Arguments):
    if args.resume_from_checkpoint in (None, "latest"):
        raise ValueError(
            "--ignore_data_skip reads another text with the state of another run: name its folder or checkpoint with "
            "--resume_from_checkpoint, and a new --output_dir."
        )
    if args.max_train_steps is None:
        raise ValueError(
            "--ignore_data_skip needs --max_train_steps, which counts the steps of the run before, too: epochs of two "
            "texts do not add up."
        )
