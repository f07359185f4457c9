"""`--report_to`: the numbers and pictures of a report in Weights & Biases or TensorBoard."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from hope_hf.common.parser import nearest
from hope_hf.common.process import one_line
from hope_hf.common.results import without_arguments

from .checkpoints import Checkpoint, reports_in
from .flags import names
from .result import Key, Number, numbers


def tracker_names(report_to: str) -> list[str]:
    """The trackers of `--report_to`, checked to exist and to be installed."""
    trackers = [] if report_to == "none" else names(report_to)
    for name in trackers:
        if name not in KINDS:
            raise ValueError(f"--report_to {name} is none of {', '.join(KINDS)}{nearest(name, KINDS)}")
        if find_spec(name) is None:
            raise ValueError(f"--report_to {name}: the tracker is not installed (pip install {name}).")
    return trackers


@dataclass(frozen=True)
class Sent:
    """What trackers get of one report."""

    numbers: dict[Key, Number]
    pictures: list[Path]
    checkpoint: Checkpoint


def sent_before(folder: str, todo: Sequence[Checkpoint]) -> list[Sent]:
    """What the reports in a folder sent, without those of the checkpoints `todo`."""
    again = {Path(checkpoint.path).name for checkpoint in todo}
    sent = []
    for report in reports_in(folder):
        if report.folder.name not in again:
            files = chain.from_iterable(report.record["pictures"].values())
            pictures = [report.folder / file for file in files]
            sent.append(Sent(numbers(report.record["results"]), pictures, report.checkpoint))
    return sent


class Trackers:
    """Sends reports to the trackers of `--report_to`, which start with the first report; a context manager.

    Attributes:
        before: what the folder's reports sent, for trackers that would show it twice or not at all; None if the
            folder's reports are not all known.
    """

    def __init__(self, report_to: str, run: str, folder: str | None):
        """`run`: the run's name. `folder`: holds their files; later evaluations into it continue the run."""
        self._names = tracker_names(report_to)
        self._run = run
        self._folder = folder
        self._open = {}
        self.before: list[Sent] | None = None

    def __enter__(self):
        return self

    def log(self, sent: Sent):
        """Send one report; raises ValueError if a tracker fails."""
        for name in self._names:
            # Every tracker has its own error types: not logged in, no network, no space.
            try:
                if name not in self._open:
                    self._open[name] = KINDS[name](self._run, self._folder, self.before)
                self._open[name].log(sent)
            except Exception as error:
                raise ValueError(f"--report_to {name} failed: {one_line(error)}") from error

    def __exit__(self, *error):
        """Send what is left."""
        for tracker in self._open.values():
            tracker.close()


class _Wandb:
    def __init__(self, run: str, folder: str, before: list[Sent] | None):
        import wandb

        digest = hashlib.sha256(os.path.abspath(folder).encode()).hexdigest()
        options = {"id": digest[:16]}
        offline = os.environ.get("WANDB_MODE") in OFFLINE
        if not offline:
            options["resume"] = "allow"
        project = os.environ.get("WANDB_PROJECT", "hope_hf")
        with without_arguments():
            self._run = wandb.init(project=project, name=f"{run}-eval", job_type="eval", dir=folder, **options)
        # Checkpoints may be evaluated in any order.
        self._run.define_metric("*", step_metric="tokens")
        self._image = wandb.Image
        # Offline every evaluation writes a run of its own: the last one holds all.
        if offline:
            for sent in before or ():
                self.log(sent)

    def log(self, sent: Sent):
        row = {"tokens": sent.checkpoint.tokens or 0, "step": sent.checkpoint.step or 0}
        for key, number in sent.numbers.items():
            row[str(key)] = number.value
            if number.stderr is not None:
                row[f"{key}_stderr"] = number.stderr
        for path in sent.pictures:
            row[path.stem] = self._image(str(path))
        self._run.log(row)

    def close(self):
        self._run.finish()


class _TensorBoard:
    def __init__(self, run: str, folder: str, before: list[Sent] | None):
        from torch.utils.tensorboard import SummaryWriter

        # All that older files hold is left out, and logged again: a suite that failed halfway would be there twice.
        purge = None if before is None else 0
        self._writer = SummaryWriter(os.path.join(folder, "tensorboard"), purge_step=purge)
        for sent in before or ():
            self.log(sent)

    def log(self, sent: Sent):
        at = sent.checkpoint.tokens or sent.checkpoint.step or 0
        for key, number in sent.numbers.items():
            self._writer.add_scalar(str(key), number.value, at)
        for path in sent.pictures:
            # Pictures exist only if matplotlib is installed.
            from matplotlib.image import imread

            self._writer.add_image(path.stem, imread(path)[..., :3], at, dataformats="HWC")

    def close(self):
        self._writer.close()


OFFLINE = ("offline", "dryrun")
KINDS = {"wandb": _Wandb, "tensorboard": _TensorBoard}
