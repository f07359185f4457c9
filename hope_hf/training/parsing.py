"""From a command line to `Arguments`: YAML file, flags that override it, one sentence for each mistake."""

import difflib
import json
import math
import warnings
from dataclasses import fields
from pathlib import Path

import yaml
from transformers import HfArgumentParser

from .arguments import FLAGS, GROUPS, Arguments
from .launch import is_first_process

DEMO_RECIPE = Path(__file__).with_name("demo.yaml")
NAMES_A_MODEL = {"model_name_or_path", "model_type", "config_name"}
NAMES_DATA = {"dataset_name", "train_file", "validation_file"}
AT_LEAST_ONE = (
    "block_size per_device_train_batch_size gradient_accumulation_steps max_train_steps save_total_limit "
    "logging_steps cpu_threads max_train_samples max_eval_samples preprocessing_num_workers"
).split()
NOT_NEGATIVE = (
    "num_warmup_steps checkpointing_steps eval_steps max_grad_norm weight_decay dataloader_num_workers seed"
).split()


class _Parser(HfArgumentParser):
    """HfArgumentParser whose complaints are a ValueError of one sentence instead of a usage text and exit."""

    def error(self, message):
        raise ValueError(f"{message[0].upper()}{message[1:]}; run_clm.py --help lists the flags.")


def nearest(name: str, known) -> str:
    """' Did you mean X?' for a misspelled `name`, or where nothing is near the empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]}?" if matches else ""


def parse(argv: list[str]) -> Arguments:
    """Read `[recipe.yaml] --flag value ...`; flags go before the recipe, the recipe before the defaults.

    Raises ValueError with one sentence that names the flag or file and the mend.
    """
    recipe, argv = ([], argv) if not argv or argv[0].startswith("-") else (_read_recipe(argv[0]), argv[1:])
    usage = "%(prog)s [recipe.yaml] --output_dir DIR [flags]"
    parser = _Parser(GROUPS, prog="run_clm.py", usage=usage, allow_abbrev=False)
    named = _named(parser, recipe + argv)
    demo = not named & (NAMES_A_MODEL | NAMES_DATA)
    if demo:
        # Who asks for epochs does not want the demo's steps.
        left_out = {"max_train_steps"} if "num_train_epochs" in named else set()
        recipe = _read_recipe(DEMO_RECIPE, left_out) + recipe
    groups = parser.parse_args_into_dataclasses(recipe + argv, look_for_args_file=False)
    values = {f.name: getattr(group, f.name) for group in groups for f in fields(group)}
    args = Arguments(**values, demo=demo)
    _check(args)
    _warn_of_ignored(args, named)
    return args


def _named(parser, words: list[str]) -> set[str]:
    """Names of the flags among `words`; ValueError for one that does not exist."""
    namespace, unknown = parser.parse_known_args(words)
    for word in unknown:
        flag = word.split("=")[0]
        if flag.startswith("-"):
            known = [f"--{name}" for name in FLAGS]
            raise ValueError(f"There is no flag {flag}{nearest(flag.replace('-', '_').replace('__', '--', 1), known)}")
        raise ValueError(f"The word {word!r} follows no flag: write --flag {word}, or a YAML file as first word.")
    flags = [word.split("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")]
    return {flag.removeprefix("no_") if flag not in FLAGS else flag for flag in flags}


def _read_recipe(path: str | Path, left_out: set[str] = frozenset()) -> list[str]:
    """A YAML file of flags as command-line words, so that both ways share one check of types."""
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(f"The recipe {path} cannot be read: {reason}.") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path} must hold lines of the form 'flag: value'.")
    words = []
    for key, value in recipe.items():
        if key not in FLAGS:
            raise ValueError(f"The recipe {path} has an unknown key {key!r}{nearest(str(key), FLAGS)}")
        if value is not None and key not in left_out:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _warn_of_ignored(args: Arguments, named: set[str]):
    ignored = (
        ("num_train_epochs", args.max_train_steps is not None, "--max_train_steps is given"),
        ("validation_split_percentage", args.validation_file is not None, "--validation_file is given"),
        ("run_name", args.report_to == "none", "--report_to names no tracker"),
        ("project_name", args.report_to == "none", "--report_to names no tracker"),
    )
    for name, is_ignored, reason in ignored:
        if name in named and is_ignored and is_first_process():
            warnings.warn(f"--{name} is ignored: {reason}.", stacklevel=3)


def _check(args: Arguments):
    """Mistakes that can be seen in the flags alone."""
    if args.push_to_hub:
        raise ValueError("--push_to_hub is not available yet: train without it and upload --output_dir by hand.")
    if not args.output_dir:
        raise ValueError("--output_dir is missing: name a folder for the run.")
    for name in AT_LEAST_ONE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1.")
    for name in NOT_NEGATIVE:
        value = getattr(args, name)
        if value is not None and not value >= 0:
            raise ValueError(f"--{name} is {value}: it must be 0 or more.")
    for name in ("learning_rate", "num_train_epochs", "adam_epsilon"):
        value = getattr(args, name)
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"--{name} is {value}: it must be above 0.")
    for name in ("adam_beta1", "adam_beta2"):
        if not 0 <= getattr(args, name) < 1:
            raise ValueError(f"--{name} is {getattr(args, name)}: it must lie in [0, 1).")
    if not 0 < args.validation_split_percentage < 100:
        raise ValueError(f"--validation_split_percentage is {args.validation_split_percentage}: not in (0, 100).")
    if args.model_name_or_path and (args.config_name or args.config_overrides or args.model_type):
        flag = next(n for n in ("config_name", "config_overrides", "model_type") if getattr(args, n))
        raise ValueError(f"--{flag} shapes a new model and --model_name_or_path loads one: give only one of them.")
    if args.streaming and args.max_train_steps is None:
        raise ValueError("--streaming has no known length: give --max_train_steps.")
    if args.dataset_name and (args.train_file or args.validation_file):
        raise ValueError("--dataset_name and --train_file exclude each other: give only one of them.")
    if args.validation_file and not args.train_file:
        raise ValueError("--validation_file needs --train_file.")
