"""Results as tables on the terminal, and as the record and the page that a report holds."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from hope_hf.cli.results import SCHEMA_VERSION, Row, markdown_table, provenance

from .arguments import Arguments
from .checkpoints import as_checkpoint
from .result import SuiteResult
from .subject import Subject


def as_markdown(name: str, result: SuiteResult) -> str:
    """One suite's section: its tables and text, as on the terminal."""
    parts = [f"## {name}"]
    for title, rows in result.tables.items():
        parts += [f"### {title}", markdown_table(rows)]
    if result.text:
        parts.append(f"```\n{result.text}\n```")
    return "\n\n".join(parts) + "\n"


def summary(results: dict[str, SuiteResult]) -> str:
    """The numbers of all suites that say most, as a section; empty where there are none."""
    rows: list[Row] = [{"suite": name, **row} for name, result in results.items() for row in result.summary]
    return f"## summary\n\n{markdown_table(rows)}\n" if rows else ""


def make_record(
    args: Arguments,
    subject: Subject | None,
    results: dict[str, SuiteResult],
    failed: dict[str, str],
    seconds: float,
    unfinished: Sequence[str] = (),
) -> dict:
    """What results.json holds; `unfinished`: the suites that have not ended yet."""
    return {
        "schema_version": SCHEMA_VERSION,
        "config": asdict(args),
        "model": _describe(args, subject),
        "seed": args.seed,
        "limit": args.limit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        **provenance(),
        "results": {name: _as_record(result) for name, result in results.items()},
        "failed": failed,
        "unfinished": list(unfinished),
    }


def _as_record(result: SuiteResult) -> dict:
    return {"tables": result.tables, "samples": result.samples, "text": result.text, "summary": result.summary}


def from_record(record: dict) -> dict[str, SuiteResult]:
    """The results in a record, without their pictures and logs."""
    fields = ("tables", "samples", "text", "summary")
    return {name: SuiteResult(**{field: one[field] for field in fields}) for name, one in record["results"].items()}


def as_json(record: dict) -> str:
    """The text of results.json."""
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def as_page(record: dict, results: dict[str, SuiteResult], pictures: dict[str, list[str]]) -> str:
    """The text of results.md; `pictures`: the files of each suite that were drawn."""
    several = record["config"]["model_name_or_path"] or "models trained by the suite"
    model = record["model"] or {"name": several, "parameters": 0}
    lines = [f"# Evaluation of {model['name']}", ""]
    if model["parameters"]:
        lines.append(f"- {model['type']}, {model['parameters']:,} parameters, {model['dtype']} on {model['device']}")
    lines.append(f"- {record['date']}, seed {record['seed']}, {record['seconds']} s")
    if record["limit"]:
        lines.append(f"- **limited to {record['limit']} samples: not for publication**")
    lines += [f"- `{' '.join(map(str, record['command']))}`", ""]
    lines += [f"- **{name} could not run**: {reason}" for name, reason in record["failed"].items()]
    lines += [f"- **{name} has not ended yet**" for name in record["unfinished"]]
    sections = [summary(results)]
    for name, result in results.items():
        shown = "".join(f"\n![{file}]({file})\n" for file in pictures.get(name, ()))
        sections.append(as_markdown(name, result) + shown)
    return "\n".join(lines) + "\n" + "\n".join(section for section in sections if section)


def weights_time(model: str) -> str | None:
    """When the weights in a model's folder were last written; None for a name on the Hub."""
    times = [file.stat().st_mtime for file in Path(model).glob("*.safetensors")]
    return datetime.fromtimestamp(max(times), UTC).isoformat() if times else None


def _describe(args: Arguments, subject: Subject | None) -> dict | None:
    if subject is None:
        return None
    model, checkpoint = subject.model, as_checkpoint(args.model_name_or_path)
    return {
        "name": model.name_or_path,
        # of a checkpoint of a run
        "step": checkpoint.step,
        "tokens": checkpoint.tokens,
        "weights_time": weights_time(args.model_name_or_path),
        "type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        # an infinite number, such as Mamba-2's longest time step, is not JSON, so its name is written
        "config": json.loads(json.dumps(model.config.to_dict()), parse_constant=str),
    }
