"""Which ingredient of HOPE matters? The same model with one of them changed, trained on the same tokens.

The size `small` of benchmarks/quality.py on the built-in corpus, with wider levels, at one learning rate; the variants
are those of `variants.py`. Differences are to HOPE with the same seed. The seed changes the loss, and a variant with
other parameters has other initial values: a difference below the spread over seeds is not significant.

    python benchmarks/ablation.py                               all variants, two runs at a time
    python benchmarks/ablation.py --variants paper no_value_gate --seeds 1
    python benchmarks/ablation.py --report                      the table only

Finished runs are kept and not repeated; stopped runs continue at their last checkpoint.
"""

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.quality import finish, lock_folder, make_parser
from benchmarks.quality_models import FROZEN, HOPE, SIZES, build
from benchmarks.quality_plan import Job, Matrix, Rates, rows_at
from benchmarks.quality_runs import Runner
from benchmarks.quality_texts import BUILTIN, prepare
from benchmarks.variants import VARIANTS

SIZE = "small"
# Levels four times as wide as in the comparison, one head less: the levels are tested here, too.
SHAPE = replace(SIZES[SIZE], memory_heads=4, level_intermediate_size=53)
MISSING = "missing"


def table(matrix: Matrix, rows: dict[Job, dict]) -> str:
    """Loss of every variant, its difference to HOPE seed by seed, and the time it takes."""
    size = matrix.sizes[SIZE]
    (rate,) = size.learning_rates

    def by_seed(model: str, key: str) -> dict[int, float | None]:
        jobs = {seed: Job(SIZE, BUILTIN, model, Rates(rate), seed) for seed in size.more_seeds}
        return {seed: rows[job][key] for seed, job in jobs.items() if job in rows}

    own, seconds = by_seed(HOPE, "eval_loss"), by_seed(HOPE, "seconds")
    lines = ["| model | parameters | loss | minus HOPE | seeds | time / HOPE |", "|---|---|---|---|---|---|"]
    for model in matrix.models:
        losses, times = by_seed(model, "eval_loss"), by_seed(model, "seconds")
        pairs = [(loss, own[seed]) for seed, loss in losses.items() if seed in own]
        differences = [None if None in pair else pair[0] - pair[1] for pair in pairs]
        ratios = [time / seconds[seed] for seed, time in times.items() if seed in seconds]
        cells = [
            model,
            f"{build(model, size).parameters:,}",
            _mean(list(losses.values()), "{:.4f}"),
            _mean(differences, "{:+.4f}"),
            str(len(losses)),
            _mean(ratios, "{:.2f}"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _mean(values: list[float | None], form: str) -> str:
    if not values:
        return MISSING
    if None in values:
        return "diverged"
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return form.format(statistics.mean(values)) + spread


def main(argv: list[str]) -> int:
    """Run what is left and print the table. Returns 0, 2 after a mistake of the user, 1 where a run failed."""
    parser = make_parser(__doc__)
    parser.add_argument("--variants", nargs="+", default=[FROZEN, *VARIANTS], choices=[FROZEN, *VARIANTS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2], help="of every variant")
    parser.add_argument("--learning_rate", type=float, default=1.6e-2, help="default: HOPE's best")
    parser.add_argument("--report", action="store_true", help="print the table, and stop")
    return finish(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> int:
    if options.parallel < 1 or not 0 < options.learning_rate < 1:
        raise ValueError("--parallel must be at least 1, and --learning_rate lie between 0 and 1.")
    size = replace(SHAPE, learning_rates=(options.learning_rate,), more_seeds=tuple(options.seeds))
    matrix = Matrix({SIZE: size}, (BUILTIN,), (HOPE, *options.variants), BUILTIN)
    output_dir = options.output_dir.resolve()
    results_file = (options.results or output_dir / "results.jsonl").resolve()
    texts = {BUILTIN: prepare(BUILTIN, None, output_dir / "texts")}
    plan = rows_at(size.learning_rates, size.more_seeds)
    runner = Runner(matrix, texts, output_dir, results_file, plan)
    if not options.report:
        with (output_dir / ".lock").open("w") as lock:
            lock_folder(lock, output_dir)
            runner.run_all(options.parallel, lock.fileno())
    print(table(matrix, runner.rows()))
    return 1 if runner.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
