"""The checkpoints of a run that are evaluated, one after another."""

import glob
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hope_hf.cli.files import CHECKPOINT, read_small
from hope_hf.cli.process import MISTAKES

from .flags import Arguments, parse_checkpoints
from .saved_reports import is_count

# Bytes of the rows of a run of millions of steps.
METRICS = 1 << 30


@dataclass(frozen=True)
class Checkpoint:
    """A saved model of a run: its folder, and how long it had been trained, where that is known."""

    path: str
    step: int | None
    tokens: int | None


def as_checkpoint(path: str) -> Checkpoint:
    """What is known of a model's folder or Hub name: a folder `checkpoint-<step>` or its run hold the tokens."""
    found = CHECKPOINT.fullmatch(os.path.basename(os.path.normpath(path)))
    if not found:
        return Checkpoint(path, None, None)
    return Checkpoint(path, int(found[1]), _tokens(Path(path), int(found[1])))


def find_checkpoints(args: Arguments) -> list[Checkpoint]:
    """Those of `--checkpoints` in the run's folder, or of a pattern in `--model_name_or_path`, by step.

    Empty where neither is given. Raises ValueError where nothing matches, and for checkpoints of several runs.
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
        raise ValueError(f"{what} no folder checkpoint-<step>: name a run of run_clm.py, or its checkpoints.")
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
    """The tokens that a checkpoint's own file holds, or the run's metrics."""
    found = None
    # A checkpoint of the model alone has no such file.
    with suppress(*MISTAKES):
        found = json.loads(read_small(folder / "trainer.json"))["progress"]["tokens"]
    # The last row of a run that was killed may be cut off.
    with suppress(*MISTAKES):
        rows = map(json.loads, read_small(folder.parent / "metrics.jsonl", METRICS).splitlines()) if not found else ()
        found = next((row["tokens"] for row in rows if row["step"] == step), found)
    return found if is_count(found) else None
