"""docs/memory.md and docs/recipes.md have the planner's figures, as docs/planned.py writes them."""

import importlib.util
from pathlib import Path

import pytest

from hope_hf.plan import main
from hope_hf.plan.simulate import simulate
from hope_hf.plan.verdict import settings, verdict

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("planned", ROOT / "docs/planned.py")
planned = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(planned)


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("page", planned.PAGES)
def test_the_page_is_what_the_script_writes(page):
    assert (ROOT / page).read_text(encoding="utf-8") == planned.rendered(page), "run python docs/planned.py"


def test_every_recipe_has_a_row():
    # That of chats names no size: it goes on with any trained model.
    recipes = {file.stem for file in (ROOT / "recipes").glob("*.yaml")} - {"chat"}
    assert set(planned.GPUS) == recipes


@pytest.mark.parametrize("name", planned.RECOMPUTED)
def test_recomputed_blocks_are_needed(name, capsys):
    gpu = min(planned.GPUS[name], key=lambda gpu: int(gpu.split("-")[1].removesuffix("gb")))
    words = [*planned.Recipe(name).planner_words, "--no_simulate", "--gradient_checkpointing", "false", "--gpu", gpu]
    assert main(words) == 2 or "does not fit" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", planned.GPUS)
def test_the_simulated_step_fits_too(name):
    """On fake tensors: the peak of the trainer's own step is that of the arithmetic, and fits all three GPUs."""
    question = planned.Recipe(name).question()
    found = simulate(question.config, question.launch, question.step)
    rows = settings(question)
    assert all(verdict(question, rows, gpu, found).fits for gpu in question.gpus)
    assert found.peak == pytest.approx(rows[0].memory.peak, rel=0.15)
