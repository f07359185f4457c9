"""What trackers hold of a run that was killed and goes on from its checkpoint."""

import json
import struct
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from accelerate import Accelerator
from training_process import reset_accelerate

from hope_hf.common.run_arguments import Arguments
from hope_hf.training.watch.monitor import steps_between_rows
from hope_hf.training.watch.tracking import Tracker

BLOCK, HEADER = 32768, struct.Struct("<IHB")
FULL, LAST = 1, 4


def wandb_records(file: Path):
    """The records of W&B's file: LevelDB's log format after seven bytes of its own."""
    from wandb.proto import wandb_internal_pb2

    content, place, record = file.read_bytes(), 7, b""
    while place + HEADER.size <= len(content):
        left = BLOCK - place % BLOCK
        _, length, kind = HEADER.unpack_from(content, place) if left >= HEADER.size else (0, 0, 0)
        if not kind:
            place += left
            continue
        place += HEADER.size
        record += content[place : place + length]
        place += length
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def history(folder: Path) -> tuple[str, list[dict]]:
    """The id of the newest offline run in a folder, and its rows."""
    newest = max(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    rows = []
    for record in wandb_records(newest):
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or item.nested_key[0]: json.loads(item.value_json) for item in items})
    return newest.stem, rows


def log_steps(folder: Path, start_step: int, last_step: int, loss: float) -> None:
    """One launch of a run that logs a row of each step behind `start_step`."""
    reset_accelerate()
    accelerator = Accelerator(cpu=True, log_with="wandb")
    args = Arguments(output_dir=str(folder), report_to="wandb", run_name="name", project_name="project")
    tracker = Tracker(accelerator, args, 8, start_step, "run1", args.identity())
    for step in range(start_step + 1, last_step + 1):
        tracker.log(step, 10 * step, {"train/loss": loss + step}, "")
    tracker.close()
    accelerator.end_training()
    reset_accelerate()


def test_wandb_offline_holds_every_step_once_after_a_kill(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    # Killed at step 5, and its checkpoint was of step 3.
    log_steps(tmp_path, 0, 5, loss=1.0)
    log_steps(tmp_path, 3, 8, loss=2.0)
    name, found = history(tmp_path)
    # W&B's own process may write the end later.
    deadline = time.monotonic() + 30
    while len(found) < 8 and time.monotonic() < deadline:
        time.sleep(0.1)
        name, found = history(tmp_path)
    assert name == "run-run1"
    expected = [(1, 2.0), (2, 3.0), (3, 4.0), (4, 6.0), (5, 7.0), (6, 8.0), (7, 9.0), (8, 10.0)]
    assert [(row["_step"], row["train/loss"]) for row in found] == expected
    assert [row["tokens"] for row in found] == [10, 20, 30, 40, 50, 60, 70, 80]


@pytest.mark.parametrize("server_rewinds", [True, False])
def test_trackers_are_rewound_to_the_checkpoint(tmp_path, monkeypatch, capsys, server_rewinds):
    """W&B online by its own rewinding, TensorBoard by its purge."""
    begun = []

    def start(accelerator, project, config, init_kwargs):
        if "resume_from" in init_kwargs["wandb"] and not server_rewinds:
            raise RuntimeError("no rewinding here")
        begun.append(init_kwargs)

    monkeypatch.setattr(Accelerator, "init_trackers", start)
    monkeypatch.setenv("WANDB_MODE", "online")
    log_steps(tmp_path, 0, 5, loss=1.0)
    with nullcontext() if server_rewinds else pytest.warns(UserWarning, match="cannot rewind .*no rewinding here"):
        log_steps(tmp_path, 3, 8, loss=2.0)
    first, second = begun
    assert first["wandb"]["resume"] == "allow" and first["tensorboard"] == {"purge_step": 0}
    assert first["wandb"]["id"] == second["wandb"]["id"] == "run1" and second["tensorboard"] == {"purge_step": 4}
    rewound = {"resume_from": "run1?_step=3"} if server_rewinds else {"resume": "allow"}
    assert {key: value for key, value in second["wandb"].items() if "resume" in key} == rewound


@pytest.mark.parametrize(("total", "every"), [(1, 1), (99, 1), (352, 7), (500, 10), (10**6, 10)])
def test_a_short_run_has_fifty_rows(total, every):
    assert steps_between_rows(total) == every
