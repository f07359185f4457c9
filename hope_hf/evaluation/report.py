"""Prints the suites' results; writes results.json, results.md and pictures when all have ended."""

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from hope_hf.cli.files import replace_text
from hope_hf.cli.folders import check_output
from hope_hf.cli.provenance import provenance
from hope_hf.cli.tables import RESULTS_FILE, SCHEMA_VERSION, markdown_table

from .arguments import Arguments
from .checkpoints import as_checkpoint
from .display import can_draw
from .result import SuiteResult
from .subject import Subject


def check_folder(output_dir: str | None, file: str = RESULTS_FILE):
    """Raise ValueError if a report, `file`, would overwrite another in the folder or cannot be written."""
    if output_dir is None:
        return
    check_output(output_dir, "--output_dir")
    if (Path(output_dir) / file).exists():
        raise ValueError(f"--output_dir {output_dir} holds {file} already: name another folder.")


def as_markdown(name: str, result: SuiteResult) -> str:
    """One suite's section: its tables and text, as on the terminal."""
    parts = [f"## {name}"]
    for title, rows in result.tables.items():
        parts += [f"### {title}", markdown_table(rows)]
    if result.text:
        parts.append(f"```\n{result.text}\n```")
    return "\n\n".join(parts) + "\n"


def make_record(
    args: Arguments, subject: Subject | None, results: dict[str, SuiteResult], failed: dict[str, str], seconds: float
) -> dict:
    """What results.json holds."""
    return {
        "schema_version": SCHEMA_VERSION,
        "config": asdict(args),
        "model": _describe(args, subject),
        "seed": args.seed,
        "limit": args.limit,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(seconds, 1),
        **provenance(),
        "results": {name: {"tables": r.tables, "samples": r.samples} for name, r in results.items()},
        "failed": failed,
    }


def as_json(record: dict) -> str:
    """The text of results.json."""
    return json.dumps(record, indent=2, allow_nan=False) + "\n"


def write_report(output_dir: str, record: dict, results: dict[str, SuiteResult]) -> Path:
    """Write the folder's files, results.json last; returns its path. Raises ValueError if they cannot be written."""
    folder = Path(output_dir)
    if any(result.pictures for result in results.values()) and not can_draw():
        results = {name: replace(result, pictures={}) for name, result in results.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for result in results.values():
            for file, draw in result.pictures.items():
                draw(folder / file)
            for file, rows in result.logs.items():
                # lm-eval's documents hold values of any type.
                lines = (json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
                (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
        (folder / "results.md").write_text(_page(record, results), encoding="utf-8")
        replace_text(folder / RESULTS_FILE, as_json(record))
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be written: {error.strerror}.") from None
    return folder / RESULTS_FILE


def _page(record: dict, results: dict[str, SuiteResult]) -> str:
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
    return "\n".join(lines) + "\n" + "\n".join(map(_section, results, results.values()))


def _section(name: str, result: SuiteResult) -> str:
    pictures = "".join(f"\n![{file}]({file})\n" for file in result.pictures)
    return as_markdown(name, result) + pictures


def _describe(args: Arguments, subject: Subject | None) -> dict | None:
    if subject is None:
        return None
    model, checkpoint = subject.model, as_checkpoint(args.model_name_or_path)
    return {
        "name": model.name_or_path,
        # of a checkpoint of a run
        "step": checkpoint.step,
        "tokens": checkpoint.tokens,
        "type": model.config.model_type,
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        # an infinite number, such as Mamba-2's longest time step, is not JSON, so its name is written
        "config": json.loads(json.dumps(model.config.to_dict()), parse_constant=str),
    }
