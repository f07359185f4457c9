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


def beats(folder: Path, rank: int) -> list[dict]:
    return [json.loads(line) for line in (folder / "processes" / f"heartbeat_rank{rank}.jsonl").open()]


def profiled(folder: Path) -> list[dict[str, float]]:
    """The rows of the table of profiled steps, by column."""
    table = (folder / "profile-4-5" / "table.md").read_text().splitlines()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table if line.startswith("|")]
    rows = [[float(cell.replace(",", "")) for cell in row] for row in lines[2:]]
    return [dict(zip(lines[0], row, strict=True)) for row in rows]


def test_nan_slow_data_and_the_loss_of_one_rank_are_in_its_heartbeat(tmp_path, corpus):
    ended = trained("nan_at_step_3,slow_data", tmp_path / "run", corpus, "--profile_steps", "4-5")
    assert ended.returncode == 0, ended.stderr[-3000:]
    first, second = (beats(tmp_path / "run", rank) for rank in (0, 1))
    assert [beat["loss"] is None for beat in second] == [False, False, True, False, False]
    assert all(beat["loss"] is not None for beat in first)
    assert min(beat["data_seconds"] for beat in second) >= trouble_worker.SLOW_SECONDS
    assert max(beat["data_seconds"] for beat in first) < trouble_worker.SLOW_SECONDS
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
        assert mean is None if other["loss"] is None else mean == pytest.approx((own["loss"] + other["loss"]) / 2)


@pytest.mark.long
def test_batches_read_ahead_and_the_profile_of_a_slow_processor(tmp_path, corpus):
    flags = ["--dataloader_num_workers", "2", "--profile_steps", "4-5"]
    ended = trained("slow_data,slow_processor", tmp_path / "run", corpus, *flags)
    assert ended.returncode == 0, ended.stderr[-3000:]
    # The batch after the first is read while the step computes.
    assert statistics.median(beat["data_seconds"] for beat in beats(tmp_path / "run", 1)) < trouble_worker.SLOW_SECONDS
    waits, slow = profiled(tmp_path / "run")
    assert slow["compute"] > 1000 * trouble_worker.SLOW_SECONDS > waits["compute"]
    assert waits["communication"] > slow["communication"]


def test_a_hang_leaves_stacks_and_the_rank_that_did_not_come(tmp_path, corpus):
    flags = ["--watchdog_seconds", "2", "--ddp_timeout", "6"]
    ended = trained("hang_at_step_3", tmp_path / "run", corpus, *flags)
    assert ended.returncode == 1
    assert "error: another process of this run did not come within --ddp_timeout" in ended.stderr
    # Both ended the same step, so that the heartbeats do not tell who did not come: the stacks do.
    assert [beats(tmp_path / "run", rank)[-1]["step"] for rank in (0, 1)] == [2, 2]
    first, second = ((tmp_path / "run" / "processes" / f"stacks_rank{rank}.txt").read_text() for rank in (0, 1))
    assert 'trouble_worker.py", line' in second and "in model_inputs" in second
    assert "in model_inputs" not in first


@pytest.mark.long
def test_data_prepared_for_longer_than_the_others_wait(tmp_path, corpus):
    ended = trained("slow_preparation", tmp_path / "run", corpus, "--ddp_timeout", "2")
    assert ended.returncode == 1
    assert "error: another process of this run did not come within --ddp_timeout (Timed out waiting" in ended.stderr
    assert "or raise --ddp_timeout" in ended.stderr
