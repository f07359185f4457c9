"""MAD's tasks, recall and state tracking: HOPE and its peers, each at its best learning rate.

    python benchmarks/mad.py                           MAD and mqar, two trainings at a time on one thread each
    python benchmarks/mad.py --tasks s3 --models hope hope_flipping        what it trains only if it is named
    python benchmarks/mad.py --tasks mad-recall mqar --models hope llama
    python benchmarks/mad.py --report                           the tables only

Models of width 64 and two layers (Mamba-2: four) train on fresh samples as `benchmarks/synthetic.py` trains
them: the same steps, batches and samples for every model, and about as many parameters (one number of each is fitted;
the rest of HOPE is its config's default). `hope_frozen` is the control: only convolutions and levels learn.
`hope_hybrid` has sparse attention in its second layer, with a window that covers the whole text; `hope_hybrid_quarter`
reads a quarter of 512 tokens, in 8 blocks and a window of 64. `hope_flipping` has rates of up to 1.99, and
`hope_self_modifying` remakes keys and values by memories. Learning rates are tried in order, a later one only if
the earlier ones left mistakes. Finished trainings are appended to the results file and not repeated.
"""

import argparse
import hashlib
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import benchmarks.quality.peers  # noqa: F401  registers its models
from benchmarks.quality.models import SPARSE, fields_of_model
from benchmarks.quality.program import finish
from benchmarks.quality.results import append, origin, read_rows
from benchmarks.synthetic.measure import known_tasks
from benchmarks.synthetic.measure import measure as measure_task
from benchmarks.synthetic.model import small_model
from benchmarks.synthetic.training import Diverged
from hope_hf.common.devices import set_up_cpu
from hope_hf.common.flags import ModelArguments
from hope_hf.common.results import provenance

# Model type, and the fields that give all models one size (0.13 M parameters besides the embedding).
UNTIED = {"tie_word_embeddings": False}
# The suite's optimizer updates every level at every step; the periods are those that the published rows name.
HOPE = UNTIED | {"level_intermediate_sizes": [32, 32, 32], "level_periods": [1_000_000, 4_000_000, 16_000_000]}
# A write may turn what is stored under its key into its opposite: eigenvalues from -1 to 1.
FLIPPING = {"memory_learning_rate_max": 1.99, "memory_learning_rate_bias": [0.0, 8.0]}
# Memories remake keys and values from one chunk to the next, so a text needs several.
SELF_MODIFYING = {"memory_projections": ["k", "v"], "memory_chunk_size": 4}
HYBRID = HOPE | {"layer_types": ["hope_memory", "sparse_attention"], "level_intermediate_sizes": [56, 56, 56]}
MAMBA = {"num_hidden_layers": 4, "state_size": 52, "initializer_range": round((3 * 64) ** -0.5, 3)}
DELTANET = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2}
DELTANET |= {"linear_num_value_heads": 4, "intermediate_size": 164}
DELTANET_2 = {"linear_head_dim": 32, "linear_num_heads": 2, "intermediate_size": 168}
MODELS = {
    "hope": ("hope", HOPE),
    "hope_frozen": ("hope", HOPE | {"memory_learning_rate_max": 0.0}),
    "hope_hybrid": ("hope", HYBRID),
    "hope_hybrid_quarter": ("hope", HYBRID | SPARSE),
    "hope_flipping": ("hope", HOPE | FLIPPING),
    "hope_self_modifying": ("hope", HOPE | SELF_MODIFYING),
    "hope_self_modifying_flipping": ("hope", HOPE | FLIPPING | SELF_MODIFYING),
    "llama": ("llama", UNTIED | {"intermediate_size": 256}),
    "llama_conv": ("llama_conv", UNTIED | {"intermediate_size": 252}),
    "mamba2": ("mamba2", UNTIED | MAMBA),
    "gated_deltanet": ("gated_deltanet", UNTIED | DELTANET),
    "gated_deltanet_2": ("gated_deltanet_2", UNTIED | DELTANET_2),
}
# Rows per step and largest number of steps; a training ends earlier if all of 1,024 unseen samples are right.
NAMES = ("compression", "recall", "fuzzy-recall", "selective-copying", "memorisation")
TASKS = dict.fromkeys((*(f"mad-{name}" for name in NAMES), "mqar"), (32, 1000))
TASKS |= {"s3": (32, 2000), "a5": (32, 2000), "rekeyed": (64, 3000)}
# Trained only if they are named.
NAMED_ONLY = {"hope_flipping", "hope_self_modifying", "hope_self_modifying_flipping", "gated_deltanet_2"}
NAMED_ONLY |= {"rekeyed", "s3", "a5"}
LEARNING_RATES = (3e-3, 1e-2)

# The result of a training: the accuracy at each of the task's lengths, or None if it diverged.
Accuracies = list[float] | None


@dataclass(frozen=True)
class Job:
    """One training."""

    task: str
    model: str
    learning_rate: float
    seed: int

    @property
    def architecture(self) -> ModelArguments:
        """The model's type and fields."""
        model_type, overrides = MODELS[self.model]
        return ModelArguments(model_type=model_type, config_overrides=json.dumps(overrides))

    @property
    def settings(self) -> str:
        """A hash of the model's config and of its training: rows with different hashes are never compared."""
        config = fields_of_model(small_model(self.architecture, 16, 0).config)
        words = json.dumps([config, TASKS[self.task]], sort_keys=True, default=str)
        return hashlib.sha256(words.encode()).hexdigest()[:12]


def measure(job: Job) -> dict:
    """Train and test; the row for the results file, with `"accuracy": None` if the training diverged."""
    start = time.perf_counter()
    rows, steps = TASKS[job.task]
    task = known_tasks()[job.task].with_settings(
        batch_size=rows, max_train_steps=steps, learning_rate=job.learning_rate
    )
    try:
        lengths = measure_task(task, job.architecture, job.seed)
        accuracy = [length["accuracy"] for length in lengths]
        row = lengths[0]
    except Diverged:
        accuracy = None
        row = {}
    return asdict(job) | {
        "accuracy": accuracy,
        **{name: row.get(name) for name in ("steps", "parameters", "n")},
        "seconds": round(time.perf_counter() - start, 3),
        "settings": job.settings,
        **origin(provenance()),
    }


def load(path: Path, jobs: list[Job]) -> dict[Job, Accuracies]:
    """The accuracies of those `jobs` that are finished; ValueError for a line that is not a row."""
    expected = {job: job.settings for job in jobs}

    def read(row: dict) -> tuple[Job, str, Accuracies]:
        shares = row["accuracy"]
        job = Job(row["task"], row["model"], row["learning_rate"], row["seed"])
        return job, row["settings"], None if shares is None else [float(share) for share in shares]

    rows = read_rows(path, read, "training")
    return {job: accuracies for job, settings, accuracies in rows if settings == expected.get(job)}


def unsolved(jobs: list[Job], rows: dict[Job, Accuracies]) -> list[Job]:
    """Unfinished `jobs` whose task no learning rate solves with every seed."""
    seeds, rates = {job.seed for job in jobs}, {job.learning_rate for job in rows}

    def solved(job: Job, rate: float) -> bool:
        done = [rows.get(replace(job, learning_rate=rate, seed=seed)) for seed in seeds]
        return all(accuracies is not None and min(accuracies) == 1 for accuracies in done)

    return [job for job in jobs if job not in rows and not any(solved(job, rate) for rate in rates)]


def table(rows: dict[Job, Accuracies]) -> str:
    """Accuracy in percent at each model's best rate, by length: mean and spread over seeds; and the rate."""

    def best(task: str, model: str) -> str:
        by_rate: dict[float, list[Accuracies]] = {}
        for job, accuracies in rows.items():
            if (job.task, job.model) == (task, model):
                by_rate.setdefault(job.learning_rate, []).append(accuracies)
        finished = {rate: seeds for rate, seeds in by_rate.items() if None not in seeds}
        if not finished:
            return "diverged" if by_rate else "missing"
        rate, seeds = max(finished.items(), key=lambda item: sum(map(sum, item[1])) / len(item[1]))
        return f"{by_length(seeds)} ({rate:g})"

    tasks = list(dict.fromkeys(job.task for job in rows))
    lines = [["model", *tasks], ["---"] * (len(tasks) + 1)]
    lines += [[model, *(best(task, model) for task in tasks)] for model in MODELS]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def by_length(seeds: list[list[float]]) -> str:
    """Accuracy in percent at each length: the mean over seeds, and the standard deviation if there are several."""

    def cell(shares: tuple[float, ...]) -> str:
        spread = f" ± {100 * statistics.stdev(shares):.1f}" if len(shares) > 1 else ""
        return f"{100 * statistics.mean(shares):.1f}{spread}"

    return " / ".join(cell(shares) for shares in zip(*seeds, strict=True))


def main(argv: list[str]) -> int:
    """Run the trainings that are left and print the table. Returns 0, or 2 after a mistake of the user."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form, allow_abbrev=False)
    parser.add_argument("--tasks", nargs="+", default=[x for x in TASKS if x not in NAMED_ONLY], choices=TASKS)
    parser.add_argument("--models", nargs="+", default=[x for x in MODELS if x not in NAMED_ONLY], choices=MODELS)
    parser.add_argument("--learning_rates", nargs="+", type=float, default=list(LEARNING_RATES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--results", type=Path, default=Path("runs/mad.jsonl"))
    parser.add_argument("--parallel", type=int, default=2, help="trainings at a time, one thread each")
    parser.add_argument("--report", action="store_true", help="print the table, and stop")
    return finish(_main, parser.parse_args(argv))


def _main(options: argparse.Namespace) -> int:
    if options.parallel < 1 or not all(0 < rate < 1 for rate in options.learning_rates):
        raise ValueError("--parallel must be at least 1, and --learning_rates lie between 0 and 1.")
    named = product(options.seeds, options.tasks, options.models, options.learning_rates)
    jobs = [Job(task, model, rate, seed) for seed, task, model, rate in named]
    if not options.report:
        # Not forked: torch already has threads.
        processes = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(options.parallel, processes, set_up_cpu, (1,)) as pool:
            try:
                _train_all(pool, options.results, jobs, options.learning_rates)
            except BaseException:
                # otherwise the pool first finishes all running and waiting trainings
                pool.shutdown(wait=False, cancel_futures=True)
                for process in multiprocessing.active_children():
                    process.terminate()
                raise
    print(table(load(options.results, jobs)))
    return 0


def _train_all(pool: Executor, path: Path, jobs: list[Job], rates: list[float]) -> None:
    """Run those `jobs` that are left, one learning rate after the other; append a row as each training ends."""
    for rate in rates:
        left = unsolved([job for job in jobs if job.learning_rate == rate], load(path, jobs))
        running = {pool.submit(measure, job): job for job in left}
        for done in as_completed(running):
            row, job = done.result(), running[done]
            append(path, row)
            accuracy = "diverged" if row["accuracy"] is None else by_length([row["accuracy"]])
            name = f"{job.task} {job.model}, learning rate {rate:g}, seed {job.seed}"
            print(f"{name}: {accuracy} after {row['steps']} steps, {row['seconds'] / 60:.1f} min", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
