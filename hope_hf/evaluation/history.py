"""The reports of a run's checkpoints: which ones exist, and their numbers over tokens."""

import json
from functools import partial
from pathlib import Path

from hope_hf.cli.files import CHECKPOINT, replace_text
from hope_hf.cli.results import RESULTS_FILE, can_draw, draw_or_warn

from .checkpoints import Checkpoint
from .compare import different_flags
from .display import small_curves
from .flags import Arguments
from .result import Number, numbers
from .saved_reports import read_report

FILE = "over_tokens.json"


def is_done(args: Arguments, checkpoint: Checkpoint, config: dict) -> bool:
    """Whether `--output_dir` holds a finished report of this checkpoint. Raises ValueError if its flags differ."""
    path = report_folder(args, checkpoint) / RESULTS_FILE
    if not path.exists():
        return False
    record = read_report(path, "--output_dir")
    flags = different_flags(config, record["config"])
    if flags:
        raise ValueError(
            f"--output_dir {args.output_dir} holds a report of {path.parent.name} with another --{flags[0]}: "
            "name another folder."
        )
    return not record["unfinished"]


def report_folder(args: Arguments, checkpoint: Checkpoint) -> Path:
    """The folder of one checkpoint's report."""
    return Path(args.output_dir) / Path(checkpoint.path).name


def draw_history(output_dir: str) -> list[Path]:
    """Draw `over_tokens_<suite>.png` of all reports in the folder and write their numbers; returns the pictures.

    The horizontal axis is steps where a checkpoint's tokens are not known. Raises ValueError for a failing write.
    """
    folder = Path(output_dir)
    found = {CHECKPOINT.fullmatch(path.parent.name): path for path in folder.glob(f"checkpoint-*/{RESULTS_FILE}")}
    paths = sorted((int(name[1]), path) for name, path in found.items() if name)
    reports = [(step, read_report(path, "--output_dir")) for step, path in paths]
    places = [{"step": step, "tokens": (record["model"] or {}).get("tokens")} for step, record in reports]
    unit = "step" if any(place["tokens"] is None for place in places) else "tokens"
    # suite -> panel -> curve -> points
    suites: dict[str, dict[str, dict[str, list[tuple[int, Number]]]]] = {}
    rows = []
    for place, (_, record) in zip(places, reports, strict=True):
        for key, number in numbers(record["results"]).items():
            panels = suites.setdefault(key.suite, {})
            curve = panels.setdefault(f"{key.name}\n{key.table}", {}).setdefault(key.row, [])
            curve.append((place[unit], number))
            rows.append(place | key._asdict() | number._asdict())
    try:
        replace_text(folder / FILE, json.dumps(rows, indent=1) + "\n")
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be written: {error.strerror}.") from None
    draws = {
        folder / f"over_tokens_{suite}.png": partial(small_curves, panels=panels, x_label=unit)
        for suite, panels in suites.items()
    }
    return [path for path, draw in draws.items() if can_draw() and draw_or_warn(draw, path)]
