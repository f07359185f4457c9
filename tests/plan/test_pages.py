"""docs/distributed.md has the planner's figures, as docs/planned.py writes them, and what it says of recipes holds."""

import importlib.util
from pathlib import Path

import pytest

from hope_hf.plan.simulate import simulate
from hope_hf.plan.verdict import settings, verdict

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("planned", ROOT / "docs/planned.py")
planned = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(planned)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_the_page_is_what_the_script_writes():
    assert planned.PAGE.read_text(encoding="utf-8") == planned.rendered(), "run python docs/planned.py"
    # The recipe of chats names no size: it goes on with any trained model.
    assert {*planned.GPUS, "chat"} == {file.stem for file in (ROOT / "recipes").glob("*.yaml")}


def test_states_are_those_of_the_literature():
    """7 B with Adam on 8 processes, and GPT-2 on 4 and 8."""
    table = {"ddp": 112, "zero1": 63, "zero2": 38.5, "zero3": 14, "full_shard": 14, "shard_grad_op": 14}
    assert {strategy: planned.states_gb(strategy) for strategy in table} == pytest.approx(table)
    of_bf16 = {strategy: planned.states_gb(strategy, planned.PURE_BF16) for strategy in ("ddp", "full_shard")}
    assert of_bf16 == pytest.approx({"ddp": 84, "full_shard": 10.5})
    parameters = planned.shapes_of(planned.MODELS["GPT-2 124M"]).count
    assert parameters == 124_439_808
    for strategy, parts, gigabytes in (("ddp", 4, 1.991), ("full_shard", 4, 0.498), ("full_shard", 8, 0.249)):
        assert planned.state_bytes(parameters, strategy, parts) / 1e9 == pytest.approx(gigabytes, abs=5e-4)


@pytest.mark.parametrize("name", planned.RECOMPUTED)
def test_recomputed_blocks_are_needed(name):
    question = planned.Recipe(name).question("--gradient_checkpointing", "false")
    smallest = min(question.gpus, key=lambda gpu: gpu.usable)
    assert settings(question)[0].memory.peak > smallest.usable


@pytest.mark.long
@pytest.mark.parametrize("name", planned.GPUS)
def test_the_simulated_step_fits_too(name):
    """On fake tensors: the peak of the trainer's own step is that of the arithmetic, and fits all three GPUs."""
    question = planned.Recipe(name).question()
    simulation = simulate(question.config, question.launch, question.step)
    rows = settings(question)
    assert all(verdict(question, rows, gpu, simulation).fits for gpu in question.gpus)
    assert simulation.peak == pytest.approx(rows[0].memory.peak, rel=0.15)
