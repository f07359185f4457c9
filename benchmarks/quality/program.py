"""HOPE and other sequence models of its size: which predicts held-out text best?

The models (`quality/models.py`) have the same parameters within 2 %, tokenizer, tokens and schedule, on three texts
(`quality/texts.py`). Each model has the best of three learning rates, found once per size (`quality/plan.py`).

    python benchmarks/quality.py --plan                     what can start now, and how long it takes
    python benchmarks/quality.py                            the whole matrix, two runs at a time on one thread each
    python benchmarks/quality.py --sizes small --texts moby_dick --models hope mamba2
    python benchmarks/quality.py --models hope --learning_rates 8e-3 --seeds 1 2 3      these rows alone
    python benchmarks/quality.py --report                   the tables only
    python benchmarks/quality.py --sizes small --vector_learning_rates 1.6e-2 3.2e-2 6.4e-2     norms, biases and
                                                            convolutions have their own rate: a model's best of these
    python benchmarks/quality.py --ablation                 HOPE with one ingredient changed, on the built-in corpus
    python benchmarks/quality.py --ablation --models paper no_value_gate --seeds 1

Texts except the built-in corpus come from the folder that --data_dir or HOPE_TEST_DATA names. Finished runs are
appended to the results file and not repeated; stopped runs continue at their last checkpoint. With `--results
docs/results/quality.jsonl` a later call continues what another one published.
"""

import argparse
import fcntl
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.quality.models import ABLATION, FROZEN, HOPE, MODELS, NAMES, SIZES, VARIANTS
from benchmarks.quality.plan import FIRST_SEED, Matrix, Plan, ready_jobs, rows_at
from benchmarks.quality.report import differences, report
from benchmarks.quality.results import load
from benchmarks.quality.runs import Runner
from benchmarks.quality.texts import BUILTIN, TEXTS, Text, prepare


def main(argv: list[str]) -> int:
    """Do the runs that are left and print the tables. Returns 0, 1 if a run failed, 2 after a mistake of the user."""
    return finish(_main, _parser().parse_args(argv))


def finish(run: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """The exit status of `run(options)`; a mistake of the user becomes one sentence and 2, Ctrl-C or SIGTERM 130."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped: the same command goes on with what is left.", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)


def lock_folder(file, output_dir: Path) -> None:
    """Lock the folder while `file` is open; ValueError if another call, or a run that it left, holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"--output_dir {output_dir} is in use by another call of this program, or by runs that it left: wait for "
            "them, or name another folder."
        ) from None


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quality"), help="texts, runs and results")
    parser.add_argument("--results", type=Path, help="results file (default: results.jsonl in the output folder)")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--data_dir", type=Path, help="folder with text/ (default: HOPE_TEST_DATA)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--texts", nargs="+", choices=TEXTS, help="default: all whose files are there")
    parser.add_argument("--models", nargs="+", choices=NAMES, help=f"default: the first {len(MODELS)}")
    parser.add_argument("--search_text", default=BUILTIN, choices=TEXTS, help="where learning rates are compared")
    parser.add_argument("--max_train_steps", type=int, help="of every run (default: the size's)")
    parser.add_argument(
        "--learning_rates", nargs="+", type=float, help="run these rows alone, instead of a search and its best"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help=f"with --learning_rates (default: {FIRST_SEED})")
    parser.add_argument(
        "--vector_learning_rates",
        nargs="+",
        type=float,
        help="of vectors: norms, biases, convolutions",
    )
    parser.add_argument("--ablation", action="store_true", help="compare variants of HOPE, seed by seed")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--plan", action="store_true", help="list the runs that can start, and stop")
    action.add_argument("--report", action="store_true", help="print the tables, and stop")
    return parser


def _main(options: argparse.Namespace) -> int:
    for name in ("max_train_steps", "parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1.")
    for name in ("learning_rates", "vector_learning_rates"):
        for rate in getattr(options, name) or ():
            if not 0 < rate < 1:
                raise ValueError(f"--{name} must lie between 0 and 1, not {rate:g}.")
    # The runs are separate processes.
    output_dir = options.output_dir.resolve()
    results_file = (options.results or output_dir / "results.jsonl").resolve()
    matrix, plan = _asked(options)
    only_look = options.plan or options.report
    required = set() if only_look else {*(options.texts or ()), matrix.search_text}
    texts = _texts(list(dict.fromkeys([*matrix.texts, matrix.search_text])), required, options, output_dir / "texts")
    if not options.report:
        matrix = replace(matrix, texts=tuple(name for name in matrix.texts if name in texts))
    runner = Runner(matrix, texts, output_dir, results_file, plan)
    if options.plan:
        print(_plan_text(runner, options.parallel))
        return 0
    if not options.report:
        with (output_dir / ".lock").open("w") as lock:
            lock_folder(lock, output_dir)
            runner.run_all(options.parallel, lock.fileno())
    rows = runner.rows()
    print((differences if options.ablation else report)(matrix, rows))
    others = len(load(results_file)) - len(rows)
    if others:
        print(f"\nLeft out: {others} runs in {results_file.name}, of other sizes or settings.")
    return 1 if runner.failures else 0


def _asked(options: argparse.Namespace) -> tuple[Matrix, Plan]:
    """The sizes, texts and models that the flags name, and their runs; ValueError for flags that do not fit."""
    changes = {}
    if options.vector_learning_rates:
        changes["vector_learning_rates"] = tuple(sorted(options.vector_learning_rates))
    if options.max_train_steps:
        changes["max_train_steps"] = options.max_train_steps
    if options.ablation:
        rates, seeds = options.learning_rates or ABLATION.learning_rates, options.seeds or ABLATION.more_seeds
        size = replace(ABLATION, learning_rates=tuple(rates), more_seeds=tuple(seeds), **changes)
        models = (HOPE, *(options.models or (FROZEN, *VARIANTS)))
        return Matrix({"small": size}, (BUILTIN,), tuple(dict.fromkeys(models)), BUILTIN), rows_at(rates, seeds)
    sizes = {name: replace(SIZES[name], **changes) for name in options.sizes}
    texts, models = tuple(options.texts or TEXTS), tuple(options.models or MODELS)
    matrix = Matrix(sizes, texts, models, options.search_text)
    if options.learning_rates is None:
        if options.seeds is not None:
            raise ValueError("--seeds needs --learning_rates: without it seeds are those of the size.")
        return matrix, ready_jobs
    if options.report:
        raise ValueError("--report shows every model at its best learning rate: leave out --learning_rates.")
    return matrix, rows_at(options.learning_rates, options.seeds or [FIRST_SEED])


def _texts(names: list[str], required: set[str], options: argparse.Namespace, work_dir: Path) -> dict[str, Text]:
    """The texts that are there; for a missing one, ValueError if it is `required`, else a printed sentence."""
    data_dir = options.data_dir or (Path(os.environ["HOPE_TEST_DATA"]) if os.environ.get("HOPE_TEST_DATA") else None)
    texts = {}
    for name in names:
        try:
            texts[name] = prepare(name, data_dir, work_dir)
        except ValueError as error:
            if name in required:
                raise
            print(f"left out: {error}", file=sys.stderr)
    return texts


def _plan_text(runner: Runner, parallel: int) -> str:
    """The runs that can start now, with the time that the same model took at this size in the results file."""
    took = {(row["size"], row["model"]): row["seconds"] for row in load(runner.results_file)}
    jobs = runner.plan(runner.matrix, runner.losses())
    lines = [f"{took[key] / 60:>5.1f} min  {job}" if (key := (job.size, job.model)) in took else f"        ?  {job}"
             for job in jobs]  # fmt: skip
    hours = sum(took.get((job.size, job.model), 0) for job in jobs) / parallel / 3600
    end = f"{len(jobs)} runs can start, about {hours:.1f} hours with {parallel} at a time; more may follow from them."
    return "\n".join([*lines, end])
