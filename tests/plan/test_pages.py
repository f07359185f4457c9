"""docs/distributed.md has the planner's figures, as docs/planned.py writes them, and what it says of recipes holds.

That the sums of presets are those of steps simulated whole is shown in `test_memory.py`.
"""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("planned", ROOT / "docs/planned.py")
planned = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(planned)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.long
def test_the_page_is_what_the_script_writes():
    assert planned.PAGE.read_text(encoding="utf-8") == planned.rendered(), "run python docs/planned.py"


@pytest.mark.parametrize("block", ["states", "accumulated", "sent", "mistakes", "launch_lines"])
def test_a_part_of_the_page_is_what_the_script_writes(block):
    written = {name: text for _, name, text, _ in planned.BLOCK.findall(planned.PAGE.read_text(encoding="utf-8"))}
    assert written[block] == getattr(planned, block)(), "run python docs/planned.py"
    assert set(written) == {function.__name__ for function in planned.BLOCKS}


def test_every_recipe_is_on_the_page():
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
    assert question.memory(question.launch, question.step).peak > smallest.usable
