"""Facts for the model card: training facts from the run's folder, evaluation facts from a `results.json`.

They are safe to publish: they name no folders of this machine. All texts but `EvaluationFacts.tables` need escaping.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult
from transformers import PreTrainedModel

from hope_hf.common.files import LARGEST_METRICS, read_small
from hope_hf.common.flags import as_list, is_hub_name
from hope_hf.common.models import card_metadata
from hope_hf.common.results import SCHEMA_VERSION, commands_of, markdown_table

from .public import as_text, public_command, public_value, without_folders

FIX = "take it out of the folder to export without it"
LOSSES = ("eval_loss", "eval_perplexity", "eval_bits_per_byte")
# Most rows of one table; the gates of a large model, one row per head, take thousands.
MOST_ROWS = 40


@dataclass(frozen=True)
class TrainingFacts:
    """How a model was trained."""

    text: str
    """The training text, described for people."""
    dataset: str | None
    """Name of the data set on the Hub."""
    base_model: str | None
    """Name on the Hub of the model whose weights the training began with."""
    commands: list[str]
    """First to last; a run that was continued with changes has several."""
    num_processes: int
    versions: dict[str, str]
    steps: int | None
    tokens: int | None
    """Training tokens of all processes."""
    losses: dict[str, float]
    """The last evaluation: `eval_loss` (nats per token), `eval_perplexity`, `eval_bits_per_byte`, where known."""


@dataclass(frozen=True)
class EvaluationFacts:
    """What `hope-hf eval` measured."""

    tables: dict[str, str]
    """Suite -> its tables in Markdown, each under its title."""
    metrics: list[EvalResult]
    """Empty where the evaluation was limited to a few samples."""
    command: str
    date: str
    limit: int | None
    """The samples of the evaluation were limited to this number."""


def read_card(folder: Path) -> tuple[str | None, str | None]:
    """Licence of the weights, and the model that they come from, by the metadata of a README.md."""
    data = card_metadata(folder / "README.md")
    license, base_model = (value if isinstance(value, str) else None for value in (data.license, data.base_model))
    return license, base_model if base_model and is_hub_name(base_model) else None


def read_training(folder: Path) -> TrainingFacts | None:
    """The facts in `run.json`, `metrics.jsonl` and `all_results.json` of a run; None if there is no `run.json`.

    Raises ValueError with one sentence for a file that cannot be read.
    """
    if not (folder / "run.json").exists():
        return None
    record = _read_object(folder / "run.json", FIX)
    try:
        flags = record["identity"]
        dataset, base_model = flags["dataset_name"], flags["model_name_or_path"]
        facts = {
            "text": _text(flags),
            "dataset": dataset if dataset and dataset != "synthetic" and is_hub_name(dataset) else None,
            "base_model": base_model if base_model and is_hub_name(base_model) else None,
            "commands": list(map(public_command, commands_of(record))),
            "num_processes": int(record["num_processes"]),
            "versions": {name: version for name, version in record["versions"].items() if version},
        }
    except (LookupError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{folder / 'run.json'} is not one that hope-hf train wrote: {FIX}.") from None
    return TrainingFacts(**facts, **_length(folder / "metrics.jsonl"), losses=_losses(folder / "all_results.json"))


def _text(flags: dict) -> str:
    if flags["dataset_name"] == "synthetic":
        return "seeded random tokens"
    if flags["dataset_name"]:
        name = public_value("dataset_name", flags["dataset_name"])
        config = flags["dataset_config_name"]
        return f"the data set {name}" + (f" ({public_value('dataset_config_name', config)})" if config else "")
    # A run of an earlier version may lack some of these flags.
    for flag, kind in (("train_file", ""), ("dataset_mixture", "the mixture "), ("train_shards", "the shards ")):
        if flags.get(flag):
            return kind + " ".join(public_value(flag, name) for name in as_list(flags[flag]))
    return "the sources of Python's standard library"


def _length(path: Path) -> dict[str, int | None]:
    """Steps and tokens of the last row of metrics; a run without rows has none."""
    try:
        last = json.loads(read_small(path, LARGEST_METRICS).splitlines()[-1])
        return {"steps": int(last["step"]), "tokens": int(last["tokens"])}
    except (FileNotFoundError, IndexError):
        return {"steps": None, "tokens": None}
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"The last row of {path} cannot be read: {FIX}.") from None


def _losses(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    results = _read_object(path, FIX)
    try:
        return {name: float(results[name]) for name in LOSSES if name in results}
    except (TypeError, ValueError):
        raise ValueError(f"{path} holds a result that is not a number: {FIX}.") from None


def read_evaluation(path: Path, model: PreTrainedModel) -> EvaluationFacts:
    """The facts in a `results.json` that was measured on `model`.

    Raises ValueError with one sentence if the file cannot be read or belongs to another model.
    """
    fix = "name a results.json that hope-hf eval wrote for this model with --results"
    record = _read_object(path, fix)
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema_version {record.get('schema_version')!r}, not {SCHEMA_VERSION}: {fix}.")
    if record.get("unfinished"):
        raise ValueError(f"{path} is of an evaluation that has not ended: wait for it, or run its command again.")
    try:
        size = (record["model"] or {}).get("parameters")
        suites = {name: suite["tables"] for name, suite in record["results"].items()}
        facts = EvaluationFacts(
            tables={name: _tables(tables, record["config"]) for name, tables in suites.items() if tables},
            metrics=[] if record["limit"] else _metrics(suites, record["config"]),
            command=public_command(record["command"]),
            date=str(record["date"]),
            limit=record["limit"],
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{path} is damaged: {fix}.") from None
    if size != model.num_parameters():
        has = f"of a model of {size:,} parameters" if isinstance(size, int) else "of several models"
        raise ValueError(f"{path} holds results {has} and this one has {model.num_parameters():,}: {fix}.")
    return facts


def _tables(tables: dict, flags: dict) -> str:
    def cell(value: object) -> object:
        """A text of the report as Markdown; numbers as they are."""
        is_number = value is None or isinstance(value, int | float)
        return value if is_number else as_text(without_folders(str(value), flags))

    parts = []
    for title, rows in tables.items():
        left_out = f"\n\n(and {len(rows) - MOST_ROWS:,} rows more)" if len(rows) > MOST_ROWS else ""
        shown = markdown_table([{cell(name): cell(value) for name, value in row.items()} for row in rows[:MOST_ROWS]])
        parts.append(f"**{cell(title)}**\n\n{shown}{left_out}")
    return "\n\n".join(parts)


def _metrics(suites: dict, flags: dict) -> list[EvalResult]:
    found = []
    for title, rows in suites.get("perplexity", {}).items():
        if title.startswith("Text: "):
            text = without_folders(title.removeprefix("Text: "), flags)
            found += [
                language_modeling_result(text, name, rows[0][name])
                for name in ("loss", "perplexity", "bits_per_byte", "accuracy")
            ]
    for row in suites.get("passkey", {}).get("Passkey", []):
        where = f"Passkey, {row['length']:,} tokens, depth {row['depth']:g}"
        found.append(language_modeling_result(where, "exact_match", row["exact"]))
    return found


def language_modeling_result(text: str, metric: str, value: float) -> EvalResult:
    """One number of the card's `model-index`, measured on the text of that name."""
    return EvalResult(
        task_type="text-generation",
        dataset_type="text",
        dataset_name=text,
        # Results of the same type and configuration would be merged under the first one's name.
        dataset_config=text,
        metric_type=metric,
        metric_value=float(value),
    )


def _read_object(path: Path, fix: str) -> dict:
    """The object in a JSON file; ValueError that names the file and ends in `fix`."""
    try:
        record = json.loads(read_small(path))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: {fix}.") from None
    # RecursionError: thousands of nested brackets.
    except (OSError, ValueError, RecursionError):
        raise ValueError(f"{path} cannot be read as JSON: {fix}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no JSON object: {fix}.")
    return record
