"""From a command line to checked `Arguments`."""

import os
from dataclasses import fields

from hope_hf.cli.flags import LONGEST, ROWS, Bounds, check_streaming, warn_of_ignored_share
from hope_hf.cli.parser import Parser, named_flags, nearest
from hope_hf.cli.process import warn_once
from hope_hf.cli.recipe import replaced, split_recipe

from .arguments import ALWAYS, AUTO, FLAGS, GROUPS, TEXT, Arguments
from .checkpoints import parse_checkpoints

# Flags that a recipe of run_clm.py may contain.
TRAINING_ONLY = ("max_train_samples", "preprocessing_num_workers")


def parse(argv: list[str], suites) -> Arguments:
    """Read `[recipe.yaml] --flag value ...`; flags override the recipe, the recipe overrides the defaults.

    `suites`: name -> suite, each decorated with `reads`. `--tasks` without `--suite` chooses the suites of these.
    Raises ValueError with one sentence that names the flag or file and the fix.
    """
    if argv and os.path.isdir(argv[0]):
        raise ValueError(f"{argv[0]} is a folder: write --model_name_or_path {argv[0]}, or a YAML file as first word.")
    recipe, argv = split_recipe(argv, FLAGS)
    usage = "%(prog)s [recipe.yaml] --model_name_or_path DIR --suite NAMES [flags]"
    parser = Parser(GROUPS, prog="run_eval.py", usage=usage, allow_abbrev=False)
    recipe = replaced(recipe, named_flags(parser, argv, FLAGS))
    named = named_flags(parser, recipe + argv, FLAGS)
    groups = parser.parse_args_into_dataclasses(recipe + argv, look_for_args_file=False)
    args = Arguments(**{f.name: getattr(group, f.name) for group in groups for f in fields(group)})
    if "tasks" in named and "suite" not in named:
        # Not at the top: it imports this file.
        from .task_names import suites_of

        args.suite = ",".join(suites_of(names(args.tasks)))
    _check(args, suites)
    _warn_of_ignored(args, named, suites)
    return args


def names(text: str) -> list[str]:
    """The words of a list with commas, in order, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def parse_lengths(text: str) -> list[int]:
    """`1k,2k,65536` as ascending numbers of tokens (k is 1,024). Raises ValueError naming --lengths."""
    lengths = set()
    for word in names(text.lower()):
        number, factor = (word[:-1], 1024) if word.endswith("k") else (word, 1)
        # Python refuses to read thousands of digits.
        if not number.isdecimal() or len(number) > 20 or not int(number):
            raise ValueError(f"--lengths {text!r} has {word!r}: write whole numbers of tokens, such as 512,1k,64k.")
        lengths.add(int(number) * factor)
    if not lengths:
        raise ValueError("--lengths is empty: write whole numbers of tokens, such as 512,1k,64k.")
    if max(lengths) > LONGEST:
        raise ValueError(f"--lengths {text!r} has more than {LONGEST:,} tokens: lower it.")
    return sorted(lengths)


def parse_depths(text: str) -> list[float]:
    """`0,0.5,1` as ascending numbers from 0 to 1. Raises ValueError naming --depths."""
    try:
        depths = sorted({float(word) for word in names(text)})
    except ValueError:
        depths = []
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"--depths {text!r} must be numbers from 0 to 1 with commas between them, such as 0,0.5,1.")
    return depths


def check_batch_size(text: str | None) -> None:
    """Raise ValueError unless `--batch_size` is a number of rows or auto."""
    bounds = Bounds(**ROWS)
    # Python refuses to read thousands of digits.
    if text not in (None, AUTO) and not (text.isdecimal() and len(text) < 20 and bounds.admit(int(text))):
        raise ValueError(f"--batch_size is {text!r}: give a whole number {bounds.words()}, or auto.")


def _check(args: Arguments, suites):
    asked = names(args.suite)
    if not asked:
        raise ValueError(f"--suite {args.suite!r} is empty: choose among {', '.join(suites)}.")
    for name in asked:
        if name not in suites:
            raise ValueError(f"--suite {name} is none of {', '.join(suites)}{nearest(name, suites)}")
    if args.log_samples and "zero_shot" in asked and not args.output_dir:
        raise ValueError("--log_samples writes files: name their folder with --output_dir.")
    check_batch_size(args.batch_size)
    parse_checkpoints(args.checkpoints)
    if args.report_to != "none" and not args.output_dir:
        raise ValueError("--report_to needs a folder for pictures and the trackers' files: name it with --output_dir.")
    if args.checkpoints and not args.model_name_or_path:
        raise ValueError("--checkpoints needs a run: name its folder with --model_name_or_path.")
    if args.lengths is not None:
        parse_lengths(args.lengths)
    parse_depths(args.depths)
    if args.model_name_or_path and (args.config_name or args.config_overrides or args.model_type):
        flag = next(name for name in ("config_name", "config_overrides", "model_type") if getattr(args, name))
        raise ValueError(
            f"--{flag} shapes models that the synthetic suite trains and --model_name_or_path loads one: "
            "run them one after the other."
        )
    for name in ("dataset_name", "dataset_mixture", "train_shards"):
        if args.validation_file and getattr(args, name):
            raise ValueError(f"--{name} and --validation_file both name the text: give one of them.")
    check_streaming(args)


def _warn_of_ignored(args: Arguments, named: set[str], suites):
    if args.compare:
        for name in sorted(named - {"compare", "output_dir"}):
            warn_once(f"--{name} is ignored: --compare evaluates nothing.")
        return
    asked = names(args.suite)
    readers = {name: [suite for suite in suites if name in suites[suite].reads] for name in FLAGS}
    for name in sorted(named - ALWAYS):
        if readers[name] and not set(readers[name]) & set(asked):
            warn_once(f"--{name} is ignored: it is for --suite {' or '.join(readers[name])}.")
    if args.batch_size == AUTO and set(asked) != {"zero_shot"}:
        warn_once("--batch_size auto is for --suite zero_shot: the other suites take their default.")
    for name in TRAINING_ONLY:
        if name in named:
            warn_once(f"--{name} is ignored: it says how run_clm.py reads its training text.")
    if args.prompts and set(asked) == {"sample"}:
        for name in sorted(named & set(TEXT) - {"trust_remote_code"}):
            warn_once(f"--{name} is ignored: --prompts is given.")
    warn_of_ignored_share(args, named)
