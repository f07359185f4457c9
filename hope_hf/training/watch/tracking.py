"""Where metrics go: `metrics.jsonl` always, one console line per log, and accelerate's trackers by name."""

import json
import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import transformers
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
from tqdm.auto import tqdm

from hope_hf.common.files import replace_text
from hope_hf.common.parser import nearest
from hope_hf.common.process import one_line, warn_once
from hope_hf.common.results import without_arguments
from hope_hf.common.run_arguments import RunArguments

from ..engines.guard import OneSidedError
from ..process import shows_bars
from .metrics_file import METRICS_FILE, read_metrics

PROJECT = "hope_hf"
"""The trackers' project without `--project_name`."""
# Values of WANDB_MODE with which a run stays on this machine.
OFFLINE = ("offline", "dryrun")


def tracker_names(report_to: str) -> list[str]:
    """The trackers of `--report_to`; ValueError if one does not exist or is not installed."""
    available = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    names = report_to.replace(",", " ").split()
    if names == ["all"]:
        return available
    if names == ["none"]:
        return []
    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise ValueError(f"--report_to {name} is not a tracker{nearest(name, LOGGER_TYPE_TO_CLASS)}")
        if name not in available:
            raise ValueError(f"--report_to {name}: the tracker is not installed (pip install {name}).")
    return names


class Tracker:
    """Writes rows of metrics. Only rank 0 writes the file and the console; trackers check the rank themselves."""

    def __init__(
        self,
        accelerator: Accelerator,
        options: RunArguments,
        total_steps: int,
        start_step: int,
        run_id: str,
        flags: dict[str, object],
    ):
        self._accelerator = accelerator
        self._total_steps = total_steps
        self._file = self._bar = None
        earlier: list[dict] = []
        if accelerator.is_main_process:
            self._path = Path(options.output_dir) / METRICS_FILE
            earlier = _drop_rows_after(self._path, start_step)
            self._file = self._path.open("a", encoding="utf-8")
            if shows_bars(accelerator):
                # The bar of each saved model would interrupt this one.
                transformers.utils.logging.disable_progress_bar()
                self._bar = tqdm(total=total_steps, initial=start_step, unit="step", dynamic_ncols=True)
        if accelerator.trackers or accelerator.log_with:
            _start_trackers(accelerator, options, run_id, start_step, earlier, flags)

    def advance(self):
        """Move the bar by one optimizer step."""
        if self._bar is not None:
            self._bar.update(1)

    def log(self, step: int, tokens: int, row: dict, line: str):
        """Write one row of metrics, and `line` on the console; ValueError if the file was moved or deleted."""
        if self._file is not None:
            self._require_folder()
            self._file.write(json.dumps({"step": step, "tokens": tokens, **row}) + "\n")
            self._file.flush()
        if self._accelerator.trackers:
            self._accelerator.log({"tokens": tokens, **row}, step=step)
        self.tell(step, line)

    def _require_folder(self):
        try:
            opened = os.fstat(self._file.fileno())
            there = os.path.samestat(opened, os.stat(self._path))
        except OSError:
            there = False
        if not there:
            raise OneSidedError(
                f"--output_dir {self._path.parent} was deleted or is another run's now, and its checkpoints with it: "
                "begin again in a folder that stays."
            )

    def tell(self, step: int, line: str):
        """Print a line about a step."""
        width = len(str(self._total_steps))
        self.say(f"step {step:>{width}}/{self._total_steps} | {line}")

    def say(self, text: str):
        """Print on rank 0, above the progress bar if there is one."""
        if self._accelerator.is_main_process:
            tqdm.write(text) if self._bar is not None else print(text, flush=True)

    def close(self):
        """Close the file and the bar, so that later prints begin on a new line. Trackers end with the process."""
        if self._file is not None:
            self._file.close()
        if self._bar is not None:
            self._bar.close()


def train_line(row: dict) -> str:
    """The console's fixed fields of a training row."""
    fields = [
        # No step since the last row counted.
        "loss       -" if row["train/loss"] is None else f"loss {row['train/loss']:7.4f}",
        f"grad {_or_nan(row['train/grad_norm']):7.3f}",
        f"lr {row['train/learning_rate']:.2e}",
        f"{row['train/tokens_per_second']:>9,.0f} tok/s",
        f"mem {row['train/peak_memory_gib']:5.2f} GiB",
        f"data {row['train/data_loading_percent']:4.1f} %",
        f"eta {_clock(row['train/eta_seconds'])}",
    ]
    if "train/mfu_percent" in row:
        fields.insert(4, f"mfu {row['train/mfu_percent']:4.1f} %")
    if row["train/skipped_steps"]:
        fields.append(f"skipped {row['train/skipped_steps']}")
    if "train/empty_steps" in row:
        fields.append(f"empty {row['train/empty_steps']}")
    return " | ".join(fields)


def eval_line(row: dict) -> str:
    """The console's fixed fields of an evaluation row."""
    line = f"eval loss {row['eval/loss']:.4f} | perplexity {row['eval/perplexity']:,.2f}"
    if "eval/bits_per_byte" in row:
        line += f" | bits per byte {row['eval/bits_per_byte']:.4f}"
    return line


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d}"


def _drop_rows_after(path: Path, step: int) -> list[dict]:
    """Drop rows after the checkpoint that a run continues from: they will be logged again. Without one (0), all.

    Returns the rows that are kept.
    """
    if not path.exists():
        return []
    rows = []
    if step:
        rows = [row for row in read_metrics(path.parent) if row["step"] <= step]
    lines = [f"{json.dumps(row)}\n" for row in rows]
    replace_text(path, "".join(lines))
    return rows


def _start_trackers(
    accelerator: Accelerator, options: RunArguments, run_id: str, start_step: int, earlier: list[dict], flags: dict
) -> None:
    """Start the trackers of `--report_to`, rewound to the rows `earlier`: a killed run logs later ones again."""
    run_name = options.run_name or os.environ.get("WANDB_NAME") or Path(options.output_dir).resolve().name
    project = options.project_name or os.environ.get("WANDB_PROJECT") or PROJECT
    config = {}
    for name, value in flags.items():
        config[name] = value if isinstance(value, int | float | str | bool) else str(value)
    wandb = {"name": run_name, "dir": options.output_dir, "id": run_id}
    # TensorBoard leaves out what older files hold from this step on.
    tensorboard = {"purge_step": start_step + 1 if start_step else 0}
    start = partial(_init_trackers, accelerator, project, config, wandb, tensorboard)
    # Every tracker has its own error types: not logged in, no network, no space.
    try:
        if os.environ.get("WANDB_MODE") in OFFLINE:
            start()
            _log_again(accelerator, earlier)
        elif earlier and "wandb" in tracker_names(options.report_to):
            _rewind(start, f"{run_id}?_step={earlier[-1]['step']}")
        else:
            start(resume="allow")
    except Exception as error:
        raise ValueError(f"--report_to {options.report_to} could not start: {one_line(error)}") from error


def _init_trackers(
    accelerator: Accelerator, project: str, config: dict, wandb: dict, tensorboard: dict, **more_of_wandb: str
) -> None:
    with without_arguments():
        settings = {"wandb": wandb | more_of_wandb, "tensorboard": tensorboard}
        accelerator.init_trackers(project, config=config, init_kwargs=settings)


def _rewind(start: Callable[..., None], moment: str) -> None:
    """Continue the W&B run from the moment; where its server cannot, behind its last step."""
    try:
        start(resume_from=moment)
    except Exception as error:
        warn_once(f"W&B cannot rewind the run to {moment} ({one_line(error)}): its later steps stay as they are.")
        start(resume="allow")


def _log_again(accelerator: Accelerator, rows: list[dict]) -> None:
    """Log the rows to W&B: offline every launch writes a run of its own, and the last one holds the whole curve."""
    for tracker in accelerator.trackers:
        if tracker.name == "wandb":
            for row in rows:
                values = dict(row)
                step = values.pop("step")
                tracker.log(values, step=step)
