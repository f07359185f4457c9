"""Facts for the model card: training facts from the run's folder, evaluation facts from a `results.json`.

They are safe to publish: they name no folders of this machine. All texts but `EvaluationFacts.tables` need escaping.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult
from transformers import PreTrainedModel

from hope_hf.common.files import LARGEST_METRICS, read_object, read_small
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
    license = data.license if isinstance(data.license, str) else None
    base_model = data.base_model if isinstance(data.base_model, str) else None
    return license, _hub_name(base_model)


def _hub_name(name: str | None) -> str | None:
    return name if name and is_hub_name(name) else None


def read_training(folder: Path) -> TrainingFacts | None:
    """The facts in `run.json`, `metrics.jsonl` and `all_results.json` of a run; None if there is no `run.json`.

    Raises ValueError with one sentence for a file that cannot be read.
    """
    if not (folder / "run.json").exists():
        return None
    record = read_object(folder / "run.json", "The file", FIX)
    steps, tokens = _length(folder / "metrics.jsonl")
    losses = _losses(folder / "all_results.json")
    try:
        flags = record["identity"]
        dataset = flags["dataset_name"]
        return TrainingFacts(
            text=_text(flags),
            dataset=None if dataset == "synthetic" else _hub_name(dataset),
            base_model=_hub_name(flags["model_name_or_path"]),
            commands=[public_command(command) for command in commands_of(record)],
            num_processes=int(record["num_processes"]),
            versions={name: version for name, version in record["versions"].items() if version},
            steps=steps,
            tokens=tokens,
            losses=losses,
        )
    except (LookupError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{folder / 'run.json'} is not one that hope-hf train wrote: {FIX}.") from None


def _text(flags: dict) -> str:
    """What was read, for people."""
    if flags["dataset_name"] == "synthetic":
        return "seeded random tokens"
    if flags["dataset_name"]:
        text = f"the data set {public_value('dataset_name', flags['dataset_name'])}"
        config = flags["dataset_config_name"]
        return f"{text} ({public_value('dataset_config_name', config)})" if config else text
    # A run of an earlier version may lack some of these flags.
    for flag, kind in (("train_file", ""), ("dataset_mixture", "the mixture "), ("train_shards", "the shards ")):
        if flags.get(flag):
            return kind + " ".join(public_value(flag, name) for name in as_list(flags[flag]))
    return "the sources of Python's standard library"


def _length(path: Path) -> tuple[int | None, int | None]:
    """Steps and tokens of the last row of metrics; a run without rows has none."""
    try:
        last = json.loads(read_small(path, LARGEST_METRICS).splitlines()[-1])
        return int(last["step"]), int(last["tokens"])
    except (FileNotFoundError, IndexError):
        return None, None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"The last row of {path} cannot be read: {FIX}.") from None


def _losses(path: Path) -> dict[str, float]:
    if not path.exists():
        return {}
    results = read_object(path, "The file", FIX)
    try:
        return {name: float(results[name]) for name in LOSSES if name in results}
    except (TypeError, ValueError):
        raise ValueError(f"{path} holds a result that is not a number: {FIX}.") from None


def read_evaluation(path: Path, model: PreTrainedModel) -> EvaluationFacts:
    """The facts in a `results.json` that was measured on `model`.

    Raises ValueError with one sentence if the file cannot be read or belongs to another model.
    """
    fix = "name a results.json that hope-hf eval wrote for this model with --results"
    record = read_object(path, "The file", fix)
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema_version {record.get('schema_version')!r}, not {SCHEMA_VERSION}: {fix}.")
    if record.get("unfinished"):
        raise ValueError(f"{path} is of an evaluation that has not ended: wait for it, or run its command again.")
    try:
        size = (record["model"] or {}).get("parameters")
        facts = _evaluation_facts(record)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError):
        raise ValueError(f"{path} is damaged: {fix}.") from None
    if size != model.num_parameters():
        has = f"of a model of {size:,} parameters" if isinstance(size, int) else "of several models"
        raise ValueError(f"{path} holds results {has} and this one has {model.num_parameters():,}: {fix}.")
    return facts


def _evaluation_facts(record: dict) -> EvaluationFacts:
    flags = record["config"]
    tables = {}
    for suite, result in record["results"].items():
        if result["tables"]:
            tables[suite] = _markdown(result["tables"], flags)
    return EvaluationFacts(
        tables=tables,
        metrics=[] if record["limit"] else _metrics(record["results"], flags),
        command=public_command(record["command"]),
        date=str(record["date"]),
        limit=record["limit"],
    )


def _markdown(tables: dict[str, list[dict]], flags: dict) -> str:
    """The tables of a suite, each under its title; long ones are cut."""
    parts = []
    for title, rows in tables.items():
        cells = []
        for row in rows[:MOST_ROWS]:
            cells_of_row = {}
            for name, value in row.items():
                cells_of_row[_cell(name, flags)] = _cell(value, flags)
            cells.append(cells_of_row)
        part = f"**{_cell(title, flags)}**\n\n{markdown_table(cells)}"
        if len(rows) > MOST_ROWS:
            part += f"\n\n(and {len(rows) - MOST_ROWS:,} rows more)"
        parts.append(part)
    return "\n\n".join(parts)


def _cell(value: object, flags: dict) -> object:
    """A text of the report as Markdown; numbers as they are."""
    if value is None or isinstance(value, int | float):
        return value
    return as_text(without_folders(str(value), flags))


def _metrics(suites: dict[str, dict], flags: dict) -> list[EvalResult]:
    metrics = []
    for title, rows in suites.get("perplexity", {"tables": {}})["tables"].items():
        if title.startswith("Text: "):
            text = without_folders(title.removeprefix("Text: "), flags)
            for name in ("loss", "perplexity", "bits_per_byte", "accuracy"):
                metrics.append(language_modeling_result(text, name, rows[0][name]))
    for row in suites.get("passkey", {"tables": {}})["tables"].get("Passkey", []):
        text = f"Passkey, {row['length']:,} tokens, depth {row['depth']:g}"
        metrics.append(language_modeling_result(text, "exact_match", row["exact"]))
    return metrics


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
