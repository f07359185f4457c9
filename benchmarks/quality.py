"""HOPE and other sequence models of its size: which predicts held-out text best?

HOPE, HOPE with frozen memories, Hope-Attention, Llama, Llama with HOPE's short convolutions, Mamba-2 and the gated
DeltaNet (`quality_models.py`), with the same parameters (within 2 %), tokenizer, tokens and schedule, on three texts
(`quality_texts.py`). Each model has the best of three learning rates, found once per size (`quality_plan.py`).

    python benchmarks/quality.py --plan                     what is left to do, and how long it takes
    python benchmarks/quality.py                            the whole matrix, two runs at a time on one thread each
    python benchmarks/quality.py --sizes small --texts moby_dick --models hope mamba2
    python benchmarks/quality.py --models hope --learning_rates 8e-3 --seeds 1 2 3      rows besides the plan's
    python benchmarks/quality.py --report                   the tables only
    python benchmarks/quality.py --sizes small --vector_learning_rates 1.6e-2 3.2e-2 6.4e-2     norms, biases and taps
                                                            have their own rate: a model's best of these, too

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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.quality_models import MODELS, SECONDS_PER_STEP, SIZES
from benchmarks.quality_plan import FIRST_SEED, Job, Losses, Matrix, Plan, outline, ready_jobs, rows_at
from benchmarks.quality_report import report
from benchmarks.quality_results import load
from benchmarks.quality_runs import Runner
from benchmarks.quality_texts import BUILTIN, TEXTS, Text, prepare

# What the trainer adds to a step (clipping, statistics), and a run to its steps: start, tokenization, evaluation and
# the sample at the end.
TRAINER_FACTOR, EXTRA_SECONDS, EXTRA_STEPS = 1.08, 25, 10


def estimate(job: Job, matrix: Matrix) -> float | None:
    """Seconds of a run on its own core, from `SECONDS_PER_STEP`; None for a size that was not measured."""
    per_step = SECONDS_PER_STEP.get(job.size, {}).get(job.model)
    steps = matrix.sizes[job.size].max_train_steps + EXTRA_STEPS
    return per_step and EXTRA_SECONDS + steps * TRAINER_FACTOR * per_step


def plan_text(matrix: Matrix, losses: Losses, plan: Plan, parallel: int) -> str:
    """What `plan` has left to do, one line per run, and how long it takes."""
    lines, total = [], 0.0
    for job, known in outline(matrix, losses, plan):
        seconds = estimate(job, matrix)
        total += seconds or 0.0
        duration = "?" if seconds is None else f"{seconds / 60:.1f} min"
        lines.append(f"{duration:>9}  {job}{'' if known else ' (a guess: waits for results)'}")
    hours = total / parallel / 3600
    return "\n".join([*lines, f"{len(lines)} runs, about {hours:.1f} hours with {parallel} at a time"])


def _texts(names: list[str], required: set[str], data_dir: Path | None, work_dir: Path) -> dict[str, Text]:
    """The texts that are there; for a missing one, ValueError if it is `required`, else a printed sentence."""
    texts = {}
    for name in names:
        try:
            texts[name] = prepare(name, data_dir, work_dir)
        except ValueError as error:
            if name in required:
                raise
            print(f"left out: {error}", file=sys.stderr)
    return texts


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the flags that this program shares with benchmarks/ablation.py."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quality"), help="texts, runs and results")
    parser.add_argument("--results", type=Path, help="results file (default: results.jsonl in the output folder)")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    return parser


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(__doc__)
    parser.add_argument("--data_dir", type=Path, help="folder with text/ (default: HOPE_TEST_DATA)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--texts", nargs="+", choices=TEXTS, help="default: all whose files are there")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--search_text", default=BUILTIN, choices=TEXTS, help="where learning rates are compared")
    parser.add_argument("--max_train_steps", type=int, help="of every run (default: the size's)")
    parser.add_argument(
        "--learning_rates", nargs="+", type=float, help="run these rows alone, instead of a search and its best"
    )
    parser.add_argument("--seeds", nargs="+", type=int, help=f"with --learning_rates (default: {FIRST_SEED})")
    parser.add_argument(
        "--vector_learning_rates", nargs="+", type=float, help="of norms, biases and taps (default: the size's)"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--plan", action="store_true", help="list the runs that are left, and stop")
    action.add_argument("--report", action="store_true", help="print the tables, and stop")
    return parser


def main(argv: list[str]) -> int:
    """Run what is left and print the tables. Returns 0, 2 after a mistake of the user, 1 where a run failed."""
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


def _main(options: argparse.Namespace) -> int:
    for name in ("max_train_steps", "parallel"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1.")
    for rate in options.vector_learning_rates or ():
        if not 0 < rate < 1:
            raise ValueError(f"--vector_learning_rates must lie between 0 and 1, not {rate:g}.")
    plan = _plan(options)
    changes = {}
    if options.vector_learning_rates:
        changes["vector_learning_rates"] = tuple(sorted(options.vector_learning_rates))
    if options.max_train_steps:
        changes["max_train_steps"] = options.max_train_steps
    sizes = {name: replace(SIZES[name], **changes) for name in options.sizes}
    data_dir = options.data_dir or (Path(os.environ["HOPE_TEST_DATA"]) if os.environ.get("HOPE_TEST_DATA") else None)
    # The runs are separate processes.
    output_dir = options.output_dir.resolve()
    results_file = (options.results or output_dir / "results.jsonl").resolve()
    wanted = options.texts or list(TEXTS)
    only_look = options.plan or options.report
    required = set() if only_look else {*(options.texts or ()), options.search_text}
    texts = _texts(list(dict.fromkeys([*wanted, options.search_text])), required, data_dir, output_dir / "texts")
    shown = tuple(name for name in wanted if options.report or name in texts)
    matrix = Matrix(sizes, shown, tuple(options.models), options.search_text)
    runner = Runner(matrix, texts, output_dir, results_file, plan)
    if options.plan:
        print(plan_text(matrix, runner.losses(), plan, options.parallel))
        return 0
    if not options.report:
        with (output_dir / ".lock").open("w") as lock:
            lock_folder(lock, output_dir)
            runner.run_all(options.parallel, lock.fileno())
    rows = runner.rows()
    print(report(matrix, rows))
    others = len(load(results_file)) - len(rows)
    if others:
        print(f"\nLeft out: {others} runs in {results_file.name}, of other sizes or settings.")
    return 1 if runner.failures else 0


def _plan(options: argparse.Namespace) -> Plan:
    """The search and its best rows, or the rows that the flags name; ValueError for flags that name none."""
    if options.learning_rates is None:
        if options.seeds is not None:
            raise ValueError("--seeds needs --learning_rates: without it seeds are those of the size.")
        return ready_jobs
    if options.report:
        raise ValueError("--report shows every model at its best learning rate: leave out --learning_rates.")
    if not all(0 < rate < 1 for rate in options.learning_rates):
        raise ValueError("--learning_rates must lie between 0 and 1.")
    return rows_at(options.learning_rates, options.seeds or [FIRST_SEED])


def lock_folder(file, output_dir: Path) -> None:
    """Lock the folder while `file` is open; ValueError if another call, or a run that it left, holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ValueError(
            f"--output_dir {output_dir} is in use by another call of this program, or by runs that it left: wait for "
            "them, or name another folder."
        ) from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
