"""Runs of the trainer inside the test's process."""

import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch


@dataclass(frozen=True)
class Finished:
    """A finished run with its checkpoints. Tests that change it take a copy."""

    folder: Path
    rows: list[dict]
    printed: str

    def copy(self, folder: Path) -> Path:
        return Path(shutil.copytree(self.folder, folder, symlinks=True))


def reset_accelerate():
    """accelerate keeps its state in the process: the next run would inherit it."""
    # imported here: most test files run without the programs
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@contextmanager
def training_process():
    """What a run changes in its process is undone; the sample at its end is short, since it takes long."""
    from hope_hf.training import finish

    threads = torch.get_num_threads()
    reset_accelerate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "SAMPLE_TOKENS", 4)
        yield patch
    reset_accelerate()
    torch.set_num_threads(threads)
    torch.set_flush_denormal(False)
