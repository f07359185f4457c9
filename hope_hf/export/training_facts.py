"""Reads the facts about a training from the run's folder."""

import json
from dataclasses import dataclass
from pathlib import Path

from hope_hf.cli.files import LARGEST_METRICS, read_small
from hope_hf.cli.flags import is_hub_name

from .json_file import read_object
from .public import public_command, public_value

MEND = "take it out of the folder to export without it"
LOSSES = ("eval_loss", "eval_perplexity", "eval_bits_per_byte")


@dataclass(frozen=True)
class TrainingFacts:
    """Safe to publish: no folders of this machine. Texts are still to be written as text."""

    text: str
    """The training text, described for people."""
    dataset: str | None
    """Name of the data set on the Hub."""
    base_model: str | None
    """Name on the Hub of the model whose weights the training began with."""
    command: str
    num_processes: int
    versions: dict[str, str]
    steps: int | None
    tokens: int | None
    """Read by the model, over all processes."""
    losses: dict[str, float]
    """The last evaluation: `eval_loss` (nats per token), `eval_perplexity`, `eval_bits_per_byte`, where known."""


def read_training(folder: Path) -> TrainingFacts | None:
    """The facts in `run.json`, `metrics.jsonl` and `all_results.json` of a run; None where there is no `run.json`.

    Raises ValueError with one sentence for a file that cannot be read.
    """
    if not (folder / "run.json").exists():
        return None
    record = read_object(folder / "run.json", MEND)
    try:
        flags = record["identity"]
        dataset, base_model = flags["dataset_name"], flags["model_name_or_path"]
        facts = {
            "text": _text(flags),
            "dataset": dataset if dataset and dataset != "synthetic" and is_hub_name(dataset) else None,
            "base_model": base_model if base_model and is_hub_name(base_model) else None,
            "command": public_command(record["command"]),
            "num_processes": int(record["num_processes"]),
            "versions": {name: version for name, version in record["versions"].items() if version},
        }
    except (KeyError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{folder / 'run.json'} is not one that run_clm.py wrote: {MEND}.") from None
    return TrainingFacts(**facts, **_length(folder / "metrics.jsonl"), losses=_losses(folder / "all_results.json"))


def _text(flags: dict) -> str:
    if flags["dataset_name"] == "synthetic":
        return "seeded random tokens"
    if flags["dataset_name"]:
        name = public_value("dataset_name", flags["dataset_name"])
        config = flags["dataset_config_name"]
        return f"the data set {name}" + (f" ({public_value('dataset_config_name', config)})" if config else "")
    if flags["train_file"]:
        return public_value("train_file", flags["train_file"])
    # A run of an earlier version does not have these flags.
    for flag, kind in (("dataset_mixture", "the mixture"), ("train_shards", "the shards")):
        if flags.get(flag):
            return f"{kind} {public_value(flag, flags[flag])}"
    return "the sources of Python's standard library"


def _length(path: Path) -> dict[str, int | None]:
    """Steps and tokens of the last row of metrics; a run without rows has none."""
    try:
        last = json.loads(read_small(path, LARGEST_METRICS).splitlines()[-1])
        return {"steps": int(last["step"]), "tokens": int(last["tokens"])}
    except (FileNotFoundError, IndexError):
        return {"steps": None, "tokens": None}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"The last row of {path} cannot be read: {MEND}.") from None


def _losses(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    results = read_object(path, MEND)
    try:
        return {name: float(results[name]) for name in LOSSES if name in results}
    except (TypeError, ValueError):
        raise ValueError(f"{path} holds a result that is not a number: {MEND}.") from None
