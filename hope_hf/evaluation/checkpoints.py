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
from .display import Panels, small_curves
from .flags import Arguments, parse_checkpoints
from .result import numbers
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
    matched = CHECKPOINT.fullmatch(os.path.basename(os.path.realpath(path)))
    if not matched:
        return Checkpoint(path, None, None)
    step = int(matched[1])
    return Checkpoint(path, step, _tokens(Path(path), step))


def find_checkpoints(args: Arguments) -> list[Checkpoint]:
    """The checkpoints of `--checkpoints` in the run's folder, or of a pattern in `--model_name_or_path`, by step.

    Empty if neither is given. Raises ValueError if nothing matches, and for checkpoints of several runs.
    """
    name = args.model_name_or_path
    # A folder may have brackets in its name.
    if glob.has_magic(name) and not os.path.exists(name):
        pattern = name
        what = f"--model_name_or_path {name} matches"
    elif args.checkpoints:
        pattern = os.path.join(glob.escape(name), "checkpoint-*")
        what = f"--model_name_or_path {name} holds"
    else:
        return []
    folders = []
    for path in glob.glob(pattern):
        if CHECKPOINT.fullmatch(os.path.basename(path)) and os.path.isdir(path):
            folders.append(path)
    if not folders:
        raise ValueError(f"{what} no folder checkpoint-<step>: name a run of hope-hf train, or its checkpoints.")
    if len(set(map(os.path.dirname, folders))) > 1:
        raise ValueError(f"{what} checkpoints of several runs: name one run.")
    every = parse_checkpoints(args.checkpoints)
    checkpoints = sorted(map(as_checkpoint, folders), key=lambda checkpoint: checkpoint.step)
    chosen = [checkpoint for checkpoint in checkpoints if checkpoint.step % every == 0]
    if not chosen:
        raise ValueError(
            f"--checkpoints {args.checkpoints} leaves none of {len(checkpoints)} checkpoints (steps "
            f"{checkpoints[0].step} to {checkpoints[-1].step}): name a smaller number, or all."
        )
    return chosen


def _tokens(folder: Path, step: int) -> int | None:
    """The number of training tokens from the checkpoint's own file, or from the run's metrics."""
    tokens = None
    # A checkpoint with the model alone has no such file.
    with suppress(*MISTAKES):
        tokens = json.loads(read_small(folder / "trainer.json"))["progress"]["tokens"]
    if not tokens:
        # The last row of a run that was killed may be cut off.
        with suppress(*MISTAKES):
            for line in read_small(folder.parent / "metrics.jsonl", METRICS).splitlines():
                row = json.loads(line)
                if row["step"] == step:
                    tokens = row["tokens"]
                    break
    return tokens if is_count(tokens) else None


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


@dataclass(frozen=True)
class CheckpointReport:
    """The report of a checkpoint: its folder, and the content of its results.json."""

    folder: Path
    record: dict

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint by the names in the report; its folder may be gone."""
        model = self.record["model"] or {}
        step = CHECKPOINT.fullmatch(self.folder.name)[1]
        return Checkpoint(str(self.folder), int(step), model.get("tokens"))


def reports_in(output_dir: str | Path) -> list[CheckpointReport]:
    """Each checkpoint's report in the folder, by step."""
    reports = []
    for file in Path(output_dir).glob(f"checkpoint-*/{RESULTS_FILE}"):
        if CHECKPOINT.fullmatch(file.parent.name):
            reports.append(CheckpointReport(file.parent, read_report(file, "--output_dir")))
    return sorted(reports, key=lambda report: report.checkpoint.step)


def draw_history(output_dir: str) -> list[Path]:
    """Draw `over_tokens_<suite>.png` of all reports in the folder and write their numbers; returns the pictures.

    The horizontal axis is steps where a checkpoint's tokens are not known. Raises ValueError for a failing write.
    """
    folder = Path(output_dir)
    reports = reports_in(folder)
    unit = "step" if any(report.checkpoint.tokens is None for report in reports) else "tokens"
    suites: dict[str, Panels] = {}
    rows = []
    for report in reports:
        place = {"step": report.checkpoint.step, "tokens": report.checkpoint.tokens}
        for key, number in numbers(report.record["results"]).items():
            panels = suites.setdefault(key.suite, {})
            panel = panels.setdefault(f"{key.name}\n{key.table}", {})
            panel.setdefault(key.row, []).append((place[unit], number))
            rows.append(place | key._asdict() | number._asdict())
    with write_errors(f"--output_dir {folder}"):
        replace_text(folder / FILE, json.dumps(rows, indent=1) + "\n")
    pictures = []
    for suite, panels in suites.items():
        picture = folder / f"over_tokens_{suite}.png"
        draw = partial(small_curves, panels=panels, x_label=unit)
        if can_draw() and draw_or_warn(draw, picture):
            pictures.append(picture)
    return pictures
