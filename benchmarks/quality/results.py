"""The results file of benchmarks/quality.py: one JSON object per line and finished run.

| field | meaning |
|---|---|
| size, text, model, learning_rate, seed | the run |
| vector_learning_rate | learning rate of norms, biases and convolutions; null or absent: as `learning_rate` |
| steps, tokens | optimizer steps, and tokens read in them |
| parameters | of the model |
| eval_loss | nats per token of the held-out part; null if the training diverged |
| bits_per_byte, perplexity | computed from `eval_loss` |
| seconds | of training only, wall clock |
| settings | hash of the model's config and of all flags; runs with different hashes are never compared |
| data | hash of the text |
| overrides | fields of the model's config that are not its defaults |
| commit, modified, versions, threads, date | origin of the row; modified: the code had uncommitted changes |
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.quality.models import NAMES, Model, Size, build
from benchmarks.quality.plan import Job, Matrix, Rates

# Flags that are the same for every model.
FLAGS = {
    "weight_decay": 0.1,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 1.0,
}


def flags(model: Model, size: Size, vectors: float | None = None) -> dict:
    """run_clm.py's flags that define a run with the vectors' rate `vectors`, except text, learning rate and seed."""
    own = {} if vectors is None else {"vector_learning_rate": vectors}
    return {
        "model_type": model.model_type,
        "config_overrides": model.overrides,
        "block_size": size.block_size,
        "per_device_train_batch_size": size.per_device_train_batch_size,
        "max_train_steps": size.max_train_steps,
        "num_warmup_steps": size.max_train_steps // 10,
        **FLAGS,
        "optimizer": model.optimizer,
        **own,
    }


def settings(model: Model, size: Size, vectors: float | None = None) -> str:
    """A hash of all that defines a run, except text, learning rate of matrices and seed."""
    words = json.dumps([model.identity, flags(model, size, vectors)], sort_keys=True)
    return hashlib.sha256(words.encode()).hexdigest()[:12]


def read_rows(path: Path, read: Callable[[dict], Any], noun: str) -> list:
    """The results of `read` for each line of a results file, empty without a file; ValueError for an invalid line."""
    if path.is_dir():
        raise ValueError(f"--results {path} is a folder: name a file.")
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        try:
            found.append(read(json.loads(line)))
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"--results {path}: line {number} is not a finished {noun}: remove it.") from None
    return found


def load(path: Path) -> list[dict]:
    """The rows of a results file."""

    def read(row: dict) -> dict:
        job_of(row), row["settings"], row["data"], row["eval_loss"]
        return row

    return read_rows(path, read, "run")


def append(path: Path, row: dict):
    """Add a row in one write, so that a stop leaves a complete line or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, (json.dumps(row) + "\n").encode())
        os.fsync(handle)
    finally:
        os.close(handle)


def origin(facts: dict) -> dict:
    """The fields of a row that say where it comes from; `facts`: what `hope_hf.common.results.provenance` gives."""
    return {
        "commit": facts["git"]["commit"],
        "modified": facts["git"]["modified"],
        "versions": facts["versions"],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def job_of(row: dict) -> Job:
    """The run of a row."""
    rates = Rates(row["learning_rate"], row.get("vector_learning_rate"))
    return Job(row["size"], row["text"], row["model"], rates, row["seed"])


def current(rows: Iterable[dict], matrix: Matrix, digests: dict[str, str]) -> dict[Job, dict]:
    """The rows with the settings of `matrix` and these texts; of two rows of a run, the later.

    All rates are included, but runs with one rate for all and runs with vectors' own are not mixed. A text without a
    digest here (its file is missing) counts as the one of its latest row.
    """
    # published rows may be of a variant that no longer exists
    rows = [row for row in rows if row["size"] in matrix.sizes and row["model"] in NAMES]
    one_rate = {name: None in size.vector_learning_rates for name, size in matrix.sizes.items()}
    digests = {row["text"]: row["data"] for row in rows} | digests

    @cache
    def expected(size: str, model: str, vectors: float | None) -> str:
        shape = matrix.sizes[size]
        return settings(build(model, shape), shape, vectors)

    by_job = [(job_of(row), row) for row in rows]
    return {
        job: row
        for job, row in by_job
        if (job.rates.vectors is None) == one_rate[job.size]
        and row["settings"] == expected(job.size, job.model, job.rates.vectors)
        and row["data"] == digests[job.text]
    }


def losses(rows: dict[Job, dict]) -> dict[Job, float]:
    """Validation losses, infinite if the training diverged."""
    return {job: math.inf if row["eval_loss"] is None else row["eval_loss"] for job, row in rows.items()}
