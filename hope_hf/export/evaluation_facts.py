"""Reads a `results.json` of `run_eval.py` as tables and single numbers for the model card."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import EvalResult
from transformers import PreTrainedModel

from hope_hf.cli.results import SCHEMA_VERSION, markdown_table

from .json_file import read_object
from .markdown import as_text
from .public import public_command, without_folders

# These suites train their own small models: not results of this model.
OTHER_MODELS = {"synthetic"}
# Most rows of one table; the gates of a large model, one row per head, take thousands.
MOST_ROWS = 40


@dataclass(frozen=True)
class EvaluationFacts:
    """Safe to publish: no folders of this machine. Texts but `tables` are still to be written as text."""

    tables: dict[str, str]
    """Suite -> its tables in Markdown, each under its title."""
    metrics: list[EvalResult]
    """Empty where the evaluation was limited to a few samples."""
    command: str
    date: str
    limit: int | None
    """The samples of the evaluation were limited to this number."""


def read_evaluation(path: Path, model: PreTrainedModel) -> EvaluationFacts:
    """The facts in a `results.json` that was measured on `model`.

    Raises ValueError with one sentence where the file cannot be read, or is another model's.
    """
    fix = "name a results.json that run_eval.py wrote for this model with --results"
    record = read_object(path, fix)
    if record.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema_version {record.get('schema_version')!r}, not {SCHEMA_VERSION}: {fix}.")
    if record.get("unfinished"):
        raise ValueError(f"{path} is of an evaluation that has not ended: wait for it, or run its command again.")
    try:
        measured = record["model"] or {}
        size = measured.get("parameters")
        suites = {name: suite["tables"] for name, suite in record["results"].items() if name not in OTHER_MODELS}
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
        has = f"of a model of {size:,} parameters" if isinstance(size, int) else "of no single model"
        raise ValueError(f"{path} holds results {has} and this one has {model.num_parameters():,}: {fix}.")
    return facts


def _tables(tables: dict, flags: dict) -> str:
    parts = []
    for title, rows in tables.items():
        left_out = f"\n\n(and {len(rows) - MOST_ROWS:,} rows more)" if len(rows) > MOST_ROWS else ""
        cells = [{_cell(name, flags): _cell(value, flags) for name, value in row.items()} for row in rows[:MOST_ROWS]]
        shown = markdown_table(cells)
        parts.append(f"**{_cell(title, flags)}**\n\n{shown}{left_out}")
    return "\n\n".join(parts)


def _cell(value: object, flags: dict) -> object:
    """A text of the report as Markdown; numbers as they are."""
    is_number = value is None or isinstance(value, int | float)
    return value if is_number else as_text(without_folders(str(value), flags))


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
