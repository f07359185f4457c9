"""The checkpoints of a run that are evaluated, and the reports of all of them: numbers over tokens."""

import glob
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hope_hf.common.files import CHECKPOINT, read_small, replace_text, write_errors
from hope_hf.common.process import MISTAKES
from hope_hf.common.results import RESULTS_FILE, can_draw, draw_or_warn

from .compare import different_flags
from .display import small_curves
from .flags import Arguments, parse_checkpoints
from .result import Number, numbers
from .saved_reports import is_count, read_report

# Bytes of metrics.jsonl that are read at most: enough for millions of steps.
METRICS = 1 << 30
FILE = "over_tokens.json"


@dataclass(frozen=True)
class Checkpoint:
    """A saved model of a run: its folder, and its steps and tokens of training if these are known."""

    path: str
    step: int | None
    tokens: int | None


def as_checkpoint(path: str) -> Checkpoint:
    """The checkpoint of a model's folder or Hub name; tokens come from a folder `checkpoint-<step>` or its run."""
    # A run's link `latest` has the name of its checkpoint.
    found = CHECKPOINT.fullmatch(os.path.basename(os.path.realpath(path)))
    if not found:
        return Checkpoint(path, None, None)
    return Checkpoint(path, int(found[1]), _tokens(Path(path), int(found[1])))


def find_checkpoints(args: Arguments) -> list[Checkpoint]:
    """The checkpoints of `--checkpoints` in the run's folder, or of a pattern in `--model_name_or_path`, by step.

    Empty if neither is given. Raises ValueError if nothing matches, and for checkpoints of several runs.
    """
    name = args.model_name_or_path or ""
    # A folder may have brackets in its name.
    if glob.has_magic(name) and not os.path.exists(name):
        pattern, what = name, f"--model_name_or_path {name} matches"
    elif args.checkpoints:
        pattern, what = os.path.join(glob.escape(name), "checkpoint-*"), f"--model_name_or_path {name} holds"
    else:
        return []
    named = [path for path in glob.glob(pattern) if CHECKPOINT.fullmatch(os.path.basename(path))]
    folders = [path for path in named if os.path.isdir(path)]
    if not folders:
        raise ValueError(f"{what} no folder checkpoint-<step>: name a run of hope-hf train, or its checkpoints.")
    if len({os.path.dirname(path) for path in folders}) > 1:
        raise ValueError(f"{what} checkpoints of several runs: name one run.")
    every = parse_checkpoints(args.checkpoints)
    found = sorted(map(as_checkpoint, folders), key=lambda checkpoint: checkpoint.step)
    chosen = [checkpoint for checkpoint in found if checkpoint.step % every == 0]
    if not chosen:
        raise ValueError(
            f"--checkpoints {args.checkpoints} leaves none of {len(found)} checkpoints (steps {found[0].step} to "
            f"{found[-1].step}): name a smaller number, or all."
        )
    return chosen


def _tokens(folder: Path, step: int) -> int | None:
    """The number of training tokens from the checkpoint's own file, or from the run's metrics."""
    found = None
    # A checkpoint with the model alone has no such file.
    with suppress(*MISTAKES):
        found = json.loads(read_small(folder / "trainer.json"))["progress"]["tokens"]
    # The last row of a run that was killed may be cut off.
    with suppress(*MISTAKES):
        rows = map(json.loads, read_small(folder.parent / "metrics.jsonl", METRICS).splitlines()) if not found else ()
        found = next((row["tokens"] for row in rows if row["step"] == step), found)
    return found if is_count(found) else None


def is_done(args: Arguments, checkpoint: Checkpoint) -> bool:
    """Whether `--output_dir` holds a checkpoint's report of all suites. Raises ValueError if its flags differ."""
    path = report_folder(args, checkpoint) / RESULTS_FILE
    if not path.exists():
        return False
    record = read_report(path, "--output_dir")
    flags = different_flags(vars(args), record["config"])
    if flags:
        raise ValueError(
            f"--output_dir {args.output_dir} holds a report of {path.parent.name} with another --{flags[0]}: "
            "name another folder."
        )
    return not record["unfinished"] and not record["failed"]


def report_folder(args: Arguments, checkpoint: Checkpoint) -> Path:
    """The folder of one checkpoint's report."""
    return Path(args.output_dir) / Path(checkpoint.path).name


def reports_in(output_dir: str | Path) -> list[tuple[int, Path, dict]]:
    """The step, file and content of each checkpoint's report in the folder, by step."""
    files = Path(output_dir).glob(f"checkpoint-*/{RESULTS_FILE}")
    found = {CHECKPOINT.fullmatch(path.parent.name): path for path in files}
    paths = sorted((int(name[1]), path) for name, path in found.items() if name)
    return [(step, path, read_report(path, "--output_dir")) for step, path in paths]


def draw_history(output_dir: str) -> list[Path]:
    """Draw `over_tokens_<suite>.png` of all reports in the folder and write their numbers; returns the pictures.

    The horizontal axis is steps where a checkpoint's tokens are not known. Raises ValueError for a failing write.
    """
    folder = Path(output_dir)
    reports = [(step, record) for step, _, record in reports_in(folder)]
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
    with write_errors(f"--output_dir {folder}"):
        replace_text(folder / FILE, json.dumps(rows, indent=1) + "\n")
    draws = {
        folder / f"over_tokens_{suite}.png": partial(small_curves, panels=panels, x_label=unit)
        for suite, panels in suites.items()
    }
    return [path for path, draw in draws.items() if can_draw() and draw_or_warn(draw, path)]
