"""Synthetic tasks: small models are trained from scratch and tested on unseen samples.

    python benchmarks/synthetic.py --tasks parity,mqar-16 --model_type hope --num_seeds 3
    python benchmarks/synthetic.py benchmarks/formal_languages.yaml

Within minutes this shows whether an architecture can learn to remember, count and copy, which a language model's loss
does not. The models have width 64 and two layers, or are those of --config_name. A YAML file of flags may stand first;
flags after it override it. The table goes to the terminal, and its rows to the file that --results names.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.quality.program import finish
from benchmarks.quality.results import append, origin
from hope_hf.common.devices import choose_device, set_up_cpu
from hope_hf.common.flags import ModelArguments
from hope_hf.common.recipe import is_recipe, read_recipe
from hope_hf.common.results import Row, markdown_table, provenance
from hope_hf.evaluation.flags import chosen_tasks, parse_lengths

from .measure import known_tasks, measure
from .task import Task


def make_parser() -> argparse.ArgumentParser:
    """The program's flags."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--tasks", help="comma-separated names (default: all)")
    parser.add_argument("--lengths", help="comma-separated longest words of a formal language (default: 100)")
    parser.add_argument("--max_train_steps", type=int, help="steps of training (default: the task's own)")
    parser.add_argument("--learning_rate", type=float, help="peak learning rate (default: the task's own)")
    parser.add_argument("--ema_decay", type=float, help="decay per step of a mean of the weights, tested as well")
    parser.add_argument("--num_seeds", type=int, default=1, help="models of each task, with --seed, --seed + 1, ...")
    parser.add_argument("--limit", type=int, help="samples of each length (default: the task's own)")
    parser.add_argument("--batch_size", type=int, help="rows per step (default: the task's own)")
    parser.add_argument("--seed", type=int, default=42, help="of models and samples")
    parser.add_argument("--model_type", help="hope (default) or any other causal model of transformers")
    parser.add_argument("--config_name", help="config of the model, as for hope-hf train")
    parser.add_argument("--config_overrides", help="fields of the config: 'hidden_size=256' or a JSON object")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float64"])
    parser.add_argument("--device", help="cpu, cuda, ... (default: the accelerator, if there is one)")
    parser.add_argument("--cpu_threads", type=int, help="threads (default: OMP_NUM_THREADS, or all cores)")
    parser.add_argument("--results", metavar="FILE", type=Path, help="append the rows to this file of JSON lines")
    return parser


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of a command line. Raises ValueError for a file or a number that cannot be used."""
    parser = make_parser()
    if argv and is_recipe(argv[0]):
        flags = [action.dest for action in parser._actions]
        recipe, *argv = argv
        argv = read_recipe(recipe, flags) + argv
    options = parser.parse_args(argv)
    for name in ("max_train_steps", "num_seeds", "limit", "batch_size"):
        number = getattr(options, name)
        if number is not None and number < 1:
            raise ValueError(f"--{name} is {number}: it must be at least 1.")
    for name in ("learning_rate", "ema_decay"):
        number = getattr(options, name)
        if number is not None and not 0 <= number < 1:
            raise ValueError(f"--{name} is {number}: it must be below 1, and not below 0.")
    return options


def chosen(options: argparse.Namespace) -> list[Task]:
    """The tasks of `--tasks` with the user's settings; ValueError for unknown ones."""
    tasks = known_tasks(parse_lengths(options.lengths) if options.lengths else None)
    found = []
    for name in chosen_tasks(options, "synthetic", tasks):
        task = tasks[name].with_settings(
            max_train_steps=options.max_train_steps,
            learning_rate=options.learning_rate,
            ema_decay=options.ema_decay,
            batch_size=options.batch_size,
            samples=min(options.limit, tasks[name].samples) if options.limit else None,
        )
        found.append(task)
    return found


def run(options: argparse.Namespace) -> list[Row]:
    """Train and test what the flags name; the rows are in the results file as soon as their task has ended."""
    set_up_cpu(options.cpu_threads)
    architecture = ModelArguments(
        model_type=options.model_type, config_name=options.config_name, config_overrides=options.config_overrides
    )
    rows = []
    for task in chosen(options):
        of_task = measure(
            task,
            architecture,
            options.seed,
            options.num_seeds,
            dtype=getattr(torch, options.dtype),
            device=choose_device(options.device),
        )
        rows += of_task
        if options.results:
            about = origin(provenance())
            for row in of_task:
                append(options.results, row | about)
    return rows


def main(argv: list[str]) -> int:
    """Print the table of what the flags name. Returns 0, or 2 after a mistake of the user."""

    def measure_and_print(argv: list[str]) -> int:
        print(markdown_table(run(parse(argv))))
        return 0

    return finish(measure_and_print, argv)
