"""From a command line to checked `Arguments`."""

import warnings
from dataclasses import fields

from hope_hf.cli.parser import Parser, named_flags, nearest, require_at_least_one, split_recipe

from .arguments import FLAGS, GROUPS, Arguments

AT_LEAST_ONE = (
    "samples_per_length limit max_train_steps num_seeds max_new_tokens batch_size cpu_threads max_train_samples "
    "max_eval_samples preprocessing_num_workers"
).split()

# A recipe of run_clm.py may hold them.
TRAINING_ONLY = ("max_train_samples", "preprocessing_num_workers")


def parse(argv: list[str], suites) -> Arguments:
    """Read `[recipe.yaml] --flag value ...`; flags go before the recipe, the recipe before the defaults.

    `suites` are the known names. Raises ValueError with one sentence that names the flag or file and the mend.
    """
    recipe, argv = split_recipe(argv, FLAGS)
    usage = "%(prog)s [recipe.yaml] --model_name_or_path DIR --suite NAMES [flags]"
    parser = Parser(GROUPS, prog="run_eval.py", usage=usage, allow_abbrev=False)
    named_flags(parser, recipe + argv, FLAGS)
    groups = parser.parse_args_into_dataclasses(recipe + argv, look_for_args_file=False)
    args = Arguments(**{f.name: getattr(group, f.name) for group in groups for f in fields(group)})
    _check(args, suites)
    return args


def names(text: str) -> list[str]:
    """The words of a list with commas, in order, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_lengths(text: str) -> list[int]:
    """`1k,2k,65536` as ascending numbers of tokens (k is 1,024). Raises ValueError naming --lengths."""
    lengths = set()
    for word in names(text.lower()):
        number, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
        if not number.isdecimal() or not int(number):
            raise ValueError(f"--lengths {text!r} has {word!r}: write whole numbers of tokens, such as 512,1k,64k.")
        lengths.add(int(number) * factor)
    if not lengths:
        raise ValueError("--lengths is empty: write whole numbers of tokens, such as 512,1k,64k.")
    return sorted(lengths)


def parse_depths(text: str) -> list[float]:
    """`0,0.5,1` as ascending numbers from 0 to 1. Raises ValueError naming --depths."""
    try:
        depths = sorted({float(word) for word in names(text)})
    except ValueError:
        depths = []
    if not depths or not 0 <= depths[0] <= depths[-1] <= 1:
        raise ValueError(f"--depths {text!r} must be numbers from 0 to 1 with commas between them, such as 0,0.5,1.")
    return depths


def _check(args: Arguments, suites):
    asked = names(args.suite)
    if not asked:
        raise ValueError(f"--suite is empty: choose among {', '.join(suites)}.")
    for name in asked:
        if name not in suites:
            raise ValueError(f"--suite {name} is none of {', '.join(suites)}{nearest(name, suites)}")
    require_at_least_one(args, AT_LEAST_ONE)
    for name in TRAINING_ONLY:
        if getattr(args, name) is not None:
            warnings.warn(f"--{name} is ignored: it says how run_clm.py reads its training text.", stacklevel=2)
    if args.seed < 0:
        raise ValueError(f"--seed is {args.seed}: it must be 0 or more.")
    if args.num_fewshot is not None and args.num_fewshot < 0:
        raise ValueError(f"--num_fewshot is {args.num_fewshot}: it must be 0 or more.")
    if "zero_shot" in asked and not names(args.tasks or ""):
        raise ValueError("--suite zero_shot needs --tasks: name tasks of lm-eval with commas between them.")
    if args.learning_rate is not None and not 0 < args.learning_rate < 1:
        raise ValueError(f"--learning_rate is {args.learning_rate}: it must lie between 0 and 1.")
    if not 0 <= args.ema_decay < 1:
        raise ValueError(f"--ema_decay is {args.ema_decay}: it must be at least 0 and below 1.")
    if args.lengths is not None:
        parse_lengths(args.lengths)
    parse_depths(args.depths)
    if args.model_name_or_path and (args.config_name or args.config_overrides or args.model_type):
        flag = next(name for name in ("config_name", "config_overrides", "model_type") if getattr(args, name))
        raise ValueError(
            f"--{flag} shapes models that the synthetic suite trains and --model_name_or_path loads one: "
            "run them one after the other."
        )
    if args.validation_file and args.dataset_name:
        raise ValueError("--dataset_name and --validation_file both name the text: give one of them.")
