"""`--report_to`: the numbers and pictures of a report in Weights & Biases or TensorBoard."""

import hashlib
import os
from importlib.util import find_spec
from pathlib import Path

from hope_hf.cli.parser import nearest
from hope_hf.cli.process import one_line
from hope_hf.cli.results import without_arguments

from .checkpoints import Checkpoint
from .flags import names
from .result import Key, Number


def tracker_names(report_to: str) -> list[str]:
    """The trackers of `--report_to`, checked to exist and to be installed."""
    asked = [] if report_to == "none" else names(report_to)
    for name in asked:
        if name not in KINDS:
            raise ValueError(f"--report_to {name} is none of {', '.join(KINDS)}{nearest(name, KINDS)}")
        if find_spec(name) is None:
            raise ValueError(f"--report_to {name}: the tracker is not installed (pip install {name}).")
    return asked


class Trackers:
    """Sends reports to the trackers of `--report_to`, which start with the first report; a context manager."""

    def __init__(self, report_to: str, run: str, folder: str | None):
        """`run`: the run's name. `folder`: holds their files; later evaluations into it continue the run."""
        self._names, self._run, self._folder = tracker_names(report_to), run, folder
        self._open = {}

    def __enter__(self):
        return self

    def log(self, found: dict[Key, Number], pictures: list[Path], checkpoint: Checkpoint):
        """Send one report; raises ValueError if a tracker fails."""
        for name in self._names:
            # Every tracker has its own error types: not logged in, no network, no space.
            try:
                if name not in self._open:
                    self._open[name] = KINDS[name](self._run, self._folder)
                self._open[name].log(found, pictures, checkpoint)
            except Exception as error:
                raise ValueError(f"--report_to {name} failed: {one_line(error)}") from error

    def __exit__(self, *error):
        """Send what is left."""
        for tracker in self._open.values():
            tracker.close()


class _Wandb:
    def __init__(self, run: str, folder: str):
        import wandb

        options = {}
        if os.environ.get("WANDB_MODE") != "offline":
            identity = hashlib.sha256(os.path.abspath(folder).encode()).hexdigest()[:16]
            options = {"id": identity, "resume": "allow"}
        project = os.environ.get("WANDB_PROJECT", "hope_hf")
        with without_arguments():
            self._run = wandb.init(project=project, name=f"{run}-eval", job_type="eval", dir=folder, **options)
        # Checkpoints may be evaluated in any order.
        self._run.define_metric("*", step_metric="tokens")
        self._image = wandb.Image

    def log(self, found: dict[Key, Number], pictures: list[Path], checkpoint: Checkpoint):
        row = {str(key): number.value for key, number in found.items()}
        row |= {f"{key}_stderr": number.stderr for key, number in found.items() if number.stderr is not None}
        row |= {path.stem: self._image(str(path)) for path in pictures}
        self._run.log(row | {"tokens": checkpoint.tokens or 0, "step": checkpoint.step or 0})

    def close(self):
        self._run.finish()


class _TensorBoard:
    def __init__(self, run: str, folder: str):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(os.path.join(folder, "tensorboard"))

    def log(self, found: dict[Key, Number], pictures: list[Path], checkpoint: Checkpoint):
        at = checkpoint.tokens or checkpoint.step or 0
        for key, number in found.items():
            self._writer.add_scalar(str(key), number.value, at)
        for path in pictures:
            # Pictures exist only if matplotlib is installed.
            from matplotlib.image import imread

            self._writer.add_image(path.stem, imread(path)[..., :3], at, dataformats="HWC")

    def close(self):
        self._writer.close()


KINDS = {"wandb": _Wandb, "tensorboard": _TensorBoard}
