"""Started by a launcher, once per engine: runs `run_clm.py` several times in the same processes.

    engine_worker.py PLAN.json

The plan is a list of {"folder": ..., "flags": [...]}, with optional "forget": steps whose checkpoints are removed
first, so that the run continues; "source": a finished run's folder that is copied first; "poison": [step, rank], a
loss that is not finite on one process; and "overflow": [step, rank], in fp16, a gradient that is not finite. Labels
are masked by the row's content, so that processes have different counts of valid tokens. Each run's rows go to
`FOLDER.<index>.json`.
"""

import json
import math
import os
import shutil
import sys
from pathlib import Path

import torch.distributed as dist
from pytest import MonkeyPatch
from training_process import reset_accelerate
from training_runs import forget_the_end, fp16_on_cpu, read_rows

from hope_hf.training import finish, main, setup, trainer
from hope_hf.training.preflight import run as preflight

build_data = setup.build_data


class Masked:
    """Batches with labels that are masked by the first token of their row."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for batch, state in self.batches:
            labels = batch["labels"].clone()
            for row, first in zip(labels, batch["input_ids"][:, 0], strict=True):
                row[: int(first) * 7 % (len(row) - 2)] = -100
            yield {**batch, "labels": labels}, state


def masked_data(*arguments, **keywords):
    data = build_data(*arguments, **keywords)
    data.train = Masked(data.train)
    return data


class Poisoned:
    """`summed_loss`, once not finite, or with a gradient that is not."""

    def __init__(self, loss, steps: int, gradient: bool):
        self.loss, self.steps, self.gradient = loss, steps, gradient

    def __call__(self, *arguments):
        self.steps -= 1
        loss = self.loss(*arguments)
        if self.steps:
            return loss
        return loss + (loss - loss.detach()) * 3e38 if self.gradient else loss * math.nan


def run(
    index: int,
    folder: Path,
    flags: list[str],
    forget: list[int] = (),
    source: str | None = None,
    poison: list[int] = (),
    overflow: list[int] = (),
):
    rank = int(os.environ.get("RANK", "0"))
    if source and rank == 0:
        shutil.copytree(source, folder)
    if forget and rank == 0:
        forget_the_end(folder, *forget)
    if forget and dist.is_initialized():
        dist.barrier()
    reset_accelerate()
    with MonkeyPatch.context() as patch:
        if overflow:
            fp16_on_cpu(patch)
        for place in filter(None, (poison, overflow)):
            if rank == place[1]:
                poisoned = Poisoned(trainer.summed_loss, place[0], gradient=place is overflow)
                patch.setattr(trainer, "summed_loss", poisoned)
        status = main([*flags, "--output_dir", str(folder)])
    assert status == 0, f"{folder.name} ended with {status}"
    if rank == 0:
        Path(f"{folder}.{index}.json").write_text(json.dumps(read_rows(folder)))


def run_all(plan: list[dict]):
    """Every run of the plan, in this process."""
    with MonkeyPatch.context() as patch:
        patch.setattr(setup, "build_data", masked_data)
        # The sample would take longer than the training, and leaving ends the process.
        patch.setattr(finish, "SAMPLE_TOKENS", 1)
        patch.setattr(finish, "draw_curves", lambda *arguments: None)
        patch.setattr(trainer, "leave", lambda accelerator: None)
        patch.setattr(preflight, "leave", lambda accelerator, status: None)
        for index, entry in enumerate(plan):
            folder = Path(entry["folder"])
            if os.environ.get("RANK", "0") == "0":
                print(f"\n=== {folder.name}", flush=True)
            run(index, **{**entry, "folder": folder})


if __name__ == "__main__":
    run_all(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.flush()
    if dist.is_initialized():
        dist.barrier()
        # gloo's threads can abort a finished interpreter.
        os._exit(0)
