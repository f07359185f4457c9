"""`--compare`: reports side by side, with differences and their standard errors, as a table and a figure."""

import json
import math
import warnings
from functools import partial
from pathlib import Path

from hope_hf.common.files import replace_text, write_errors
from hope_hf.common.results import Row, can_draw, draw_or_warn, markdown_table

from .display import dots, united
from .flags import Arguments
from .result import TEXT_TABLE, UNKNOWN, Key, Number, SuiteResult, numbers, put
from .saved_reports import find_report, read_report

# Flags that do not change what is measured.
WITHOUT_EFFECT = frozenset(
    "model_name_or_path trust_remote_code attn_implementation preprocessing_num_workers output_dir "
    "batch_size offline device cpu_threads checkpoints compare archive_dir report_to log_samples".split()
)
FILE = "compare.json"
# The numbers of each report.
Reports = dict[str, dict[Key, Number]]


def compare(args: Arguments) -> SuiteResult:
    """A row for every number of the reports of `--compare`, in the order of the first report.

    Each further report has its difference from the first, with the standard error of independent samples. Raises
    ValueError for a path that is not a report.
    """
    if len(args.compare) < 2:
        raise ValueError("--compare needs two reports or more: name the folders of two evaluations.")
    records = {}
    for name, run in zip(_names(args.compare), args.compare, strict=True):
        path = find_report(run, "--compare")
        records[name] = read_report(path, "--compare")
    _warn_of_other_flags(records)
    reports = _on_one_text(records)
    tables = {}
    for key in united(reports.values()):
        rows = tables.setdefault(f"{key.suite}: {key.table}", [])
        rows.append(_row(key, reports))
    if not tables:
        raise ValueError(f"--compare {args.compare[0]}: the reports hold no numbers.")
    return SuiteResult(tables, {"compare.png": partial(draw, reports)})


def _on_one_text(records: dict[str, dict]) -> Reports:
    """The numbers of each report; those of a text are under the title of the first report's text, with a warning."""
    first_name, *_ = records
    # The text of each suite in the first report.
    titles = {}
    reports = {}
    for name, record in records.items():
        report = {}
        other_texts = set()
        for key, number in numbers(record["results"]).items():
            if key.table.startswith(TEXT_TABLE):
                if name == first_name:
                    titles[key.suite] = key.table
                title = titles.get(key.suite, key.table)
                if title != key.table:
                    other_texts.add(f"{title.removeprefix(TEXT_TABLE)} and {key.table.removeprefix(TEXT_TABLE)}")
                key = key._replace(table=title)
            report[key] = number
        for texts in sorted(other_texts):
            warnings.warn(
                f"{first_name} and {name} read different texts, {texts}, so their numbers differ, too.", stacklevel=3
            )
        reports[name] = report
    return reports


def draw(reports: Reports, path: Path):
    """A panel for every number of a table: its rows from top to bottom, a mark and its error for each report."""
    panels = {}
    for name, report in reports.items():
        for key, number in report.items():
            panel = panels.setdefault(f"{key.suite}: {key.name}\n{key.table}", {})
            panel.setdefault(name, {})[key.row] = number
    dots(path, panels)


def _row(key: Key, reports: Reports) -> Row:
    row = {"row": key.row, "number": key.name}
    for name, report in reports.items():
        put(row, name, report.get(key, UNKNOWN))
    (first_name, first), *others = reports.items()
    for name, report in others:
        difference = _difference(report.get(key, UNKNOWN), first.get(key, UNKNOWN))
        put(row, f"{name} - {first_name}", difference)
    return row


def _difference(number: Number, first: Number) -> Number:
    """The number minus the first report's, with the standard error of independent samples."""
    if UNKNOWN in (number, first):
        return UNKNOWN
    stderr = None
    if None not in (number.stderr, first.stderr):
        stderr = math.hypot(first.stderr, number.stderr)
    return Number(number.value - first.value, stderr)


def _names(runs: list[str]) -> list[str]:
    """The folders' names, or the whole paths if two are equal; repeated names get a number."""
    folders = [Path(run).resolve().name for run in runs]
    if len(set(folders)) < len(runs):
        folders = runs
    names = []
    # The table has columns with these names already.
    columns = {"row", "number"}
    for position, name in enumerate(folders, start=1):
        is_column = name in columns or name.endswith("_stderr")
        names.append(f"{name} ({position})" if is_column else name)
        columns.add(name)
    return names


def _warn_of_other_flags(records: dict[str, dict]):
    (first_name, first), *others = records.items()
    for name, record in others:
        if record["unfinished"]:
            missing = ", ".join(record["unfinished"])
            warnings.warn(f"The report {name} is unfinished: it lacks {missing}.", stacklevel=2)
        changes = []
        for flag in different_flags(first["config"], record["config"]):
            if flag != "suite":
                value = first["config"][flag]
                other = record["config"][flag]
                changes.append(f"--{flag} ({value} and {other})")
        if changes:
            listed = ", ".join(changes)
            warnings.warn(f"{first_name} and {name} were evaluated with other flags: {listed}.", stacklevel=2)


def different_flags(one: dict, other: dict) -> list[str]:
    """The flags that change what is measured and differ between two reports, among those that both reports have."""
    different = []
    for flag, value in one.items():
        is_known = flag in other and flag not in WITHOUT_EFFECT
        if is_known and json.dumps(value) != json.dumps(other[flag]):
            different.append(flag)
    return different


def as_page(result: SuiteResult) -> str:
    """The comparison in Markdown."""
    parts = []
    for title, rows in result.tables.items():
        parts += [f"## {title}", markdown_table(rows)]
    return "\n\n".join(parts) + "\n"


def write_comparison(args: Arguments, result: SuiteResult, folder: Path) -> Path:
    """Write compare.json, compare.md and the picture into the folder. Raises ValueError if it cannot be written."""
    with write_errors(f"--output_dir {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "compare.md", as_page(result))
        record = {"compared": args.compare, "tables": result.tables}
        replace_text(folder / FILE, json.dumps(record, indent=2) + "\n")
    if can_draw():
        for file, draw_it in result.pictures.items():
            draw_or_warn(draw_it, folder / file)
    return folder / "compare.md"
