"""What benchmarks/strategies.py runs, and how it counts what is sent."""

from pathlib import Path

import pytest

from benchmarks.strategies import KEPT, plan, sent_bytes, strategies
from hope_hf.plan.launch import STRATEGIES, Launch
from hope_hf.plan.traffic import traffic

pytestmark = pytest.mark.benchmarks
ROOT = Path(__file__).parents[1]


def call(name: str, *dims) -> dict:
    return {"cat": "cpu_op", "name": f"c10d::{name}", "args": {"Input Dims": [*dims]}}


def test_every_launch_file_has_a_row(tmp_path):
    rows = strategies(tmp_path)
    assert rows.keys() == {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")} | {KEPT}
    launch, _ = plan(rows[KEPT], 2, 1, ["--config_name", "tiny"])
    assert launch.strategy.keeps_gathered


def test_the_collectives_of_a_step_make_the_traffic_of_the_arithmetic():
    ddp = Launch(STRATEGIES["ddp"], 4, 1)
    assert sent_bytes([call("allreduce_", [[300], [20, 5]])], ddp) == traffic(400, ddp).total
    hybrid = Launch(STRATEGIES["hybrid_shard"], 4, 2)
    calls = [call("_allgather_base_", [400], [200]), call("allgather_", [], [[200]])]
    calls += [call("_reduce_scatter_base_", [200], [400]), call("allreduce_", [[200]])]
    assert sent_bytes([*calls, {"cat": "cpu_op", "name": "aten::mm"}], hybrid) == traffic(400, hybrid).total
