"""What docs/running.md says shows a cause shows it: two processes, of which the second has the trouble."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import trouble_worker
from training_runs import LLAMA, ROOT, TWO, curve, read_rows

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("warm_python")]

SMALL = ["--block_size", "32", "--per_device_train_batch_size", "2", "--logging_steps", "1", "--learning_rate", "5e-3"]
SMALL += ["--cpu_threads", "1", "--eval_steps", "0", "--max_eval_samples", "2", "--max_train_steps", "5"]


def trained(trouble: str, folder: Path, corpus, *flags: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, *TWO, trouble_worker.__file__, trouble, *LLAMA, *corpus, *SMALL]
    return subprocess.run(
        [*command, "--output_dir", str(folder), *flags],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def heartbeats(folder: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "processes" / f"heartbeat_rank{rank}.jsonl").open()]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def profiled(folder: Path) -> list[dict[str, float]]:
    """The rows of the table of profiled steps, by column."""
    text = (folder / "profile-4-5" / "table.md").read_text()
    head, _, *lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = []
    for line in lines:
        numbers = [float(cell.replace(",", "")) for cell in cells(line)]
        rows.append(dict(zip(cells(head), numbers, strict=True)))
    return rows


def test_nan_slow_data_and_the_loss_of_one_rank_are_in_its_heartbeat(tmp_path, corpus):
    ended = trained("nan_at_step_3,slow_data", tmp_path / "run", corpus, "--profile_steps", "4-5")
    assert ended.returncode == 0, ended.stderr[-3000:]
    first = heartbeats(tmp_path / "run", 0)
    second = heartbeats(tmp_path / "run", 1)
    assert [beat["loss"] is None for beat in first] == [False] * 5
    assert [beat["loss"] is None for beat in second] == [False, False, True, False, False]
    assert max(beat["data_seconds"] for beat in first) < trouble_worker.SLOW_SECONDS
    assert min(beat["data_seconds"] for beat in second) >= trouble_worker.SLOW_SECONDS
    # The first waits for the second, so that both are equally slow. It waits less after a step in which it is late
    # itself (the first, or one at which the profile begins): hence the median.
    speeds = [beat["tokens_per_second"] for beat in first[1:]]
    assert statistics.median(speeds) < 2 * 32 / trouble_worker.SLOW_SECONDS
    # The profile: the second waits for data, and the first in a collective for the second.
    waits, slow = profiled(tmp_path / "run")
    assert waits["communication"] > slow["communication"]
    assert slow["ms a step"] - slow["compute"] > 1000 * trouble_worker.SLOW_SECONDS
    rows = read_rows(tmp_path / "run")
    # Both leave the step out.
    assert curve(rows, "train/skipped_steps") == [0, 0, 1, 1, 1]
    # Each has the loss of its own rows; the run's is their mean, as all rows have equally many tokens.
    for own, other, mean in zip(first, second, curve(rows), strict=True):
        assert own["loss"] != other["loss"]
        if other["loss"] is None:
            assert mean is None
        else:
            assert mean == pytest.approx((own["loss"] + other["loss"]) / 2)


def test_a_hang_leaves_stacks_and_the_rank_that_did_not_come(tmp_path, corpus):
    flags = ["--watchdog_seconds", "2", "--ddp_timeout", "6"]
    ended = trained("hang_at_step_3", tmp_path / "run", corpus, *flags)
    assert ended.returncode == 1
    assert "error: another process of this run did not come within --ddp_timeout" in ended.stderr
    # Both ended the same step, so that the heartbeats do not tell who did not come: the stacks do.
    for rank in (0, 1):
        assert heartbeats(tmp_path / "run", rank)[-1]["step"] == 2
        stacks = (tmp_path / "run" / "processes" / f"stacks_rank{rank}.txt").read_text()
        assert ("in model_inputs" in stacks) == (rank == 1)
