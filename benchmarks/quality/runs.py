"""The training runs of benchmarks/quality.py: one process each, several at a time, collected into the results file."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.quality import results
from benchmarks.quality.models import build
from benchmarks.quality.plan import Job, Matrix, Plan, ready_jobs
from benchmarks.quality.texts import Text

PROGRAM = Path(__file__).with_name("train.py")
CHECKPOINT_EVERY = 50


@dataclass
class Run:
    """A training run in its own process."""

    job: Job
    folder: Path
    process: subprocess.Popen

    @property
    def log(self) -> Path:
        return self.folder.parent / f"{self.folder.name}.log"


class Runner:
    """Starts and collects training runs; writes under `output_dir`, and finished runs into `results_file`."""

    def __init__(
        self,
        matrix: Matrix,
        texts: dict[str, Text],
        output_dir: Path,
        results_file: Path,
        plan: Plan = ready_jobs,
    ):
        self.matrix, self.texts, self.plan = matrix, texts, plan
        self.output_dir, self.results_file = output_dir, results_file
        self.failures: list[str] = []

    def run_all(self, parallel: int, lock: int) -> None:
        """Do runs until none is left that can start. Their processes inherit the descriptor `lock`."""
        running: list[Run] = []
        failed: set[Job] = set()
        try:
            while True:
                busy = failed | {run.job for run in running}
                waiting = [job for job in self.plan(self.matrix, self.losses()) if job not in busy]
                running += [self._start(job, lock) for job in waiting[: parallel - len(running)]]
                if not running:
                    return
                while all(run.process.poll() is None for run in running):
                    time.sleep(0.2)
                for run in [run for run in running if run.process.poll() is not None]:
                    running.remove(run)
                    if not self._collect(run):
                        failed.add(run.job)
        finally:
            # A stopped run writes a checkpoint at its next step.
            for run in running:
                run.process.terminate()
            for run in running:
                run.process.wait()

    def rows(self) -> dict[Job, dict]:
        """The rows of this matrix in the results file."""
        digests = {name: text.digest for name, text in self.texts.items()}
        return results.current(results.load(self.results_file), self.matrix, digests)

    def losses(self) -> dict[Job, float]:
        """The validation losses of these rows."""
        return results.losses(self.rows())

    def _start(self, job: Job, lock: int) -> Run:
        size, text = self.matrix.sizes[job.size], self.texts[job.text]
        model = build(job.model, size)
        name = f"{job.size}-{job.text}-{job.model}-lr{job.rates.matrices:g}-seed{job.seed}"
        identity = results.settings(model, size, job.rates.vectors)
        folder = self.output_dir / "runs" / f"{name}-{identity[:6]}{text.digest[:6]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        flags = results.flags(model, size, job.rates.vectors) | {
            "output_dir": folder,
            "train_file": text.train,
            "validation_file": text.validation,
            "tokenizer_name": text.tokenizer(size.vocab_size),
            "learning_rate": job.rates.matrices,
            "seed": job.seed,
            "eval_steps": 0,
            "checkpointing_steps": CHECKPOINT_EVERY,
            "save_total_limit": 1,
            "cpu_threads": 1,
        }
        words = (str(word) for name, value in flags.items() for word in (f"--{name}", value))
        # The second variable makes the trainer stop when this process is killed.
        own = {"OMP_NUM_THREADS": "1", "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_USE_CPU": "true"}
        print(f"start   {job}", flush=True)
        with (folder.parent / f"{folder.name}.log").open("a") as log:
            process = subprocess.Popen(
                [sys.executable, str(PROGRAM), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | own,
                pass_fds=[lock],
            )
        return Run(job, folder, process)

    def _collect(self, run: Run) -> bool:
        """Append the result of an ended run; False if it has none."""
        said = run.log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["nothing"]
        diverged = run.process.returncode == 1 and "was not finite in" in said[-1]
        if not diverged and (run.process.returncode or not (run.folder / "all_results.json").exists()):
            self.failures.append(f"{run.job} ended with status {run.process.returncode}, see {run.log}: {said[-1]}")
            print(f"failed  {self.failures[-1]}", flush=True)
            return False
        row = self._row(run.job, run.folder, diverged)
        results.append(self.results_file, row)
        # A finished run is not resumed: its weights stay, its checkpoints are deleted.
        for checkpoint in run.folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
        shown = "diverged" if row["eval_loss"] is None else f"{row['eval_loss']:.4f}"
        print(f"done    {run.job}: {shown}, {row['seconds'] / 60:.1f} min", flush=True)
        return True

    def _row(self, job: Job, folder: Path, diverged: bool) -> dict:
        size = self.matrix.sizes[job.size]
        model = build(job.model, size)
        end = {} if diverged else json.loads((folder / "all_results.json").read_text())
        if not math.isfinite(end.get("eval_loss", math.nan)):
            end = {}
        facts = json.loads((folder / "run.json").read_text())
        return {
            "size": job.size,
            "text": job.text,
            "model": job.model,
            "learning_rate": job.rates.matrices,
            "vector_learning_rate": job.rates.vectors,
            "seed": job.seed,
            "steps": size.max_train_steps,
            "tokens": size.max_train_steps * size.tokens_per_step,
            "parameters": model.parameters,
            "eval_loss": end.get("eval_loss"),
            "bits_per_byte": end.get("eval_bits_per_byte"),
            "perplexity": end.get("perplexity"),
            "seconds": round(_training_seconds(folder / "metrics.jsonl"), 3),
            "settings": results.settings(model, size, job.rates.vectors),
            "data": self.texts[job.text].digest,
            "overrides": json.loads(model.overrides),
            "threads": 1,
            **results.origin(facts),
        }


def _training_seconds(metrics: Path) -> float:
    """Seconds of the steps alone, summed over all parts of a run that was stopped and continued."""
    seconds, tokens = 0.0, 0
    for line in metrics.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if "train/tokens_per_second" in row:
            seconds += (row["tokens"] - tokens) / row["train/tokens_per_second"]
            tokens = row["tokens"]
    return seconds
