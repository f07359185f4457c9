"""`--compare`: reports side by side, with differences and their standard errors, as a table and a figure."""

import json
import math
import warnings
from functools import partial
from pathlib import Path

from hope_hf.common.files import replace_text, write_errors
from hope_hf.common.results import Row, can_draw, draw_or_warn, markdown_table

from .display import dots
from .flags import Arguments
from .result import TEXT_TABLE, Key, Number, SuiteResult, numbers
from .saved_reports import find_report, read_report

# Flags that do not change what is measured.
WITHOUT_EFFECT = frozenset(
    "model_name_or_path trust_remote_code attn_implementation preprocessing_num_workers output_dir "
    "batch_size offline device cpu_threads checkpoints compare archive_dir report_to log_samples".split()
)
FILE = "compare.json"


def compare(args: Arguments) -> SuiteResult:
    """A row for every number of the reports of `--compare`, in the order of the first report.

    Each further report has its difference from the first, with the standard error of independent samples. Raises
    ValueError for a path that is not a report.
    """
    if len(args.compare) < 2:
        raise ValueError("--compare needs two reports or more: name the folders of two evaluations.")
    paths = [find_report(run, "--compare") for run in args.compare]
    records = [read_report(path, "--compare") for path in paths]
    names = _names(args.compare)
    _warn_of_other_flags(records, names)
    columns = _on_one_text([numbers(record["results"]) for record in records], names)
    if not any(columns):
        raise ValueError(f"--compare {args.compare[0]}: the reports hold no numbers.")
    keys = list(dict.fromkeys(key for column in columns for key in column))
    rows = [_row(key, [column.get(key) for column in columns], names) for key in keys]
    tables = {}
    for key, row in zip(keys, rows, strict=True):
        tables.setdefault(f"{key.suite}: {key.table}", []).append(row)
    return SuiteResult(tables, {"compare.png": partial(draw, dict(zip(names, columns, strict=True)))})


def _on_one_text(columns: list[dict[Key, Number]], names: list[str]) -> list[dict[Key, Number]]:
    """The numbers of a text under the title of the first report's, with a warning where the texts differ."""
    titles = {key.suite: key.table for key in columns[0] if key.table.startswith(TEXT_TABLE)}
    found = []
    for name, column in zip(names, columns, strict=True):
        others, renamed = {}, {}
        for key, number in column.items():
            title = key.table
            if title.startswith(TEXT_TABLE) and titles.get(key.suite, title) != title:
                title = others[key.table] = titles[key.suite]
            renamed[key._replace(table=title)] = number
        for other, first in others.items():
            texts = f"{first.removeprefix(TEXT_TABLE)} and {other.removeprefix(TEXT_TABLE)}"
            warnings.warn(f"{names[0]} and {name} read different texts, {texts}: so differ the numbers.", stacklevel=3)
        found.append(renamed)
    return found


def draw(points: dict[str, dict[Key, Number]], path: Path):
    """A panel for every number of a table: its rows from top to bottom, a mark and its error for each report."""
    panels: dict[str, dict[str, dict[str, Number]]] = {}
    for run, column in points.items():
        for key, number in column.items():
            panels.setdefault(f"{key.suite}: {key.name}\n{key.table}", {}).setdefault(run, {})[key.row] = number
    dots(path, panels)


def _row(key: Key, found: list[Number | None], names: list[str]) -> Row:
    row = {"row": key.row, "number": key.name}
    for name, number in zip(names, found, strict=True):
        row[name], row[f"{name}_stderr"] = number or (None, None)
    first = found[0]
    for name, number in zip(names[1:], found[1:], strict=True):
        both = first is not None and number is not None
        errors = [first.stderr, number.stderr] if both else [None]
        column = f"{name} - {names[0]}"
        row[column] = number.value - first.value if both else None
        row[f"{column}_stderr"] = None if None in errors else math.hypot(*errors)
    return row


def _names(runs: list[str]) -> list[str]:
    """The folders' names, or the whole paths if two are equal; repeated names get a number."""
    short = [Path(run).resolve().name for run in runs]
    names = short if len(set(short)) == len(runs) else runs
    # The table has columns with these names already.
    taken = [name in ("row", "number") or name.endswith("_stderr") for name in names]
    again = [names.index(name) != index for index, name in enumerate(names)]
    return [f"{name} ({i + 1})" if taken[i] or again[i] else name for i, name in enumerate(names)]


def _warn_of_other_flags(records: list[dict], names: list[str]):
    first = records[0]["config"]
    for name, record in zip(names[1:], records[1:], strict=True):
        if record["unfinished"]:
            listed = ", ".join(record["unfinished"])
            warnings.warn(f"The report {name} is unfinished: it lacks {listed}.", stacklevel=2)
        config = record["config"]
        flags = [flag for flag in different_flags(first, config) if flag != "suite"]
        if flags:
            listed = ", ".join(f"--{flag} ({first[flag]} and {config[flag]})" for flag in flags)
            warnings.warn(f"{names[0]} and {name} were evaluated with other flags: {listed}.", stacklevel=2)


def different_flags(one: dict, other: dict) -> list[str]:
    """The flags that change what is measured and differ between two reports, among those that both reports have."""
    known = [flag for flag in one if flag in other and flag not in WITHOUT_EFFECT]
    return [flag for flag in known if json.dumps(one[flag]) != json.dumps(other[flag])]


def as_page(result: SuiteResult) -> str:
    """The comparison in Markdown."""
    return "\n\n".join(f"## {title}\n\n{markdown_table(rows)}" for title, rows in result.tables.items()) + "\n"


def write_comparison(args: Arguments, result: SuiteResult, folder: Path) -> Path:
    """Write compare.json, compare.md and the picture into the folder. Raises ValueError if it cannot be written."""
    with write_errors(f"--output_dir {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / "compare.md", as_page(result))
        record = {"compared": args.compare, "tables": result.tables}
        replace_text(folder / FILE, json.dumps(record, indent=2) + "\n")
    for file, draw_it in result.pictures.items() if can_draw() else ():
        draw_or_warn(draw_it, folder / file)
    return folder / "compare.md"
