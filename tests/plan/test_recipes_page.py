"""Every recipe has its launch line on docs/recipes.md, and every figure there is the planner's."""

import re
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import pytest
import yaml

from hope_hf.plan import main
from hope_hf.plan.gpus import GIB
from hope_hf.plan.parsing import Question, parse
from hope_hf.plan.simulate import simulate
from hope_hf.plan.verdict import settings, verdict

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/recipes.md"
RECIPES = {file.stem: yaml.safe_load(file.read_text()) for file in sorted((ROOT / "recipes").glob("*.yaml"))}
# As --accelerate_config and so on of the planner.
AS_PLANNED = {"--config_file": "--accelerate_config", "--num_processes": "--world_size"}


@dataclass(frozen=True)
class Launched:
    """A recipe, the flags of its launch line, and the GPUs that its row of the page has."""

    name: str
    launcher: tuple[str, ...]

    def question(self, *words: str) -> Question:
        return parse([f"recipes/{self.name}.yaml", *self.launch, *self.model, *words])

    @cached_property
    def launch(self) -> list[str]:
        return [AS_PLANNED.get(word, word) for word in self.launcher]

    @cached_property
    def model(self) -> list[str]:
        """Of a second phase: that of the first, whose weights are not there yet."""
        source = RECIPES[self.name].get("model_name_or_path")
        first = [recipe for recipe in RECIPES.values() if source and recipe.get("output_dir") == source]
        return ["--config_name", first[0]["config_name"]] if first else []


def launch_lines(text: str) -> dict[str, str]:
    """By recipe, the lines that start it, with what `\\` continues joined."""
    joined = re.sub(r"\s*\\\n[#\s]*", " ", text)
    return {
        found[1]: found[0]
        for found in re.finditer(r"accelerate launch [^\n`]*?run_clm\.py recipes/(\w+)\.yaml", joined)
    }


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def launched(name: str) -> Launched:
    words = launch_lines(PAGE.read_text(encoding="utf-8"))[name].split()
    return Launched(name, tuple(words[2 : words.index("run_clm.py")]))


def prices(page: str) -> dict[str, float]:
    """Of an hour of each GPU, as the page assumes them."""
    return {gpu: float(price) for gpu, price in re.findall(r"([\w-]+gb) at ([\d.]+)", page)}


def row(name: str, page: str) -> str:
    """A recipe's row of the table; its GPUs are those that the row names."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
    names = re.findall(r"[\w-]+gb", line)
    assert len(names) == 3
    cost = prices(page)
    asked = launched(name)
    question = asked.question("--gpu", ",".join(names), "--no_simulate")
    found = settings(question)
    verdicts = [verdict(question, found, gpu, None) for gpu in question.gpus]
    assert all(one.fits for one in verdicts), name
    cells = []
    for one in verdicts:
        money = one.days * 24 * question.launch.world_size * cost[one.gpu.name]
        cells.append(f"{one.gpu.name}: {duration(one.days)}, {money:,.0f}" if money >= 1 else f"{one.gpu.name}: < 1")
    sizes = (
        f"{question.tokens_per_step:,}",
        f"{question.args.max_train_steps:,}",
        f"{question.total_tokens / 1e9:.3g}",
        f"{found[0].memory.peak / GIB:.1f}",
    )
    return f"| `{name}` | {question.launch.world_size} | {' | '.join(sizes)} | {'; '.join(cells)} |"


def duration(days: float) -> str:
    return f"{days:.1f} days" if days >= 0.95 else f"{24 * days:.1f} hours"


@pytest.mark.parametrize("name", RECIPES)
def test_the_row_is_the_planners(name, page):
    assert row(name, page) in page


@pytest.mark.parametrize("name", RECIPES)
def test_the_launch_line_of_the_page_stands_in_the_recipe(name, page):
    lines = launch_lines((ROOT / f"recipes/{name}.yaml").read_text(encoding="utf-8"))
    if name != "demo":
        assert lines[name] == launch_lines(page)[name]


def without_recomputation(name: str, page: str) -> tuple[float, str]:
    """Planned GiB, and the GPU with the least memory in the recipe's row."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
    question = launched(name).question("--no_simulate", "--gradient_checkpointing", "false")
    gpu = min(re.findall(r"[\w-]+gb", line), key=lambda gpu: int(re.search(r"(\d+)gb", gpu)[1]))
    return settings(question)[0].memory.peak / GIB, gpu


def sentences(page: str) -> list[str]:
    """Every other passage of the page with a planned figure."""
    names = ("pilot", "mid", "mid_4096", "target", "target_8192")
    sizes = [f"{without_recomputation(name, page)[0]:.0f}" for name in names]
    question = launched("llama_7b").question("--no_simulate")
    reduced = settings(question)[0].memory
    held = settings(replace(question, step=replace(question.step, sync_each_batch=False)))[0].memory
    return [
        f"Without it they would need {', '.join(sizes[:-1])} and {sizes[-1]} GiB",
        f"after each of the four batches, and a process needs {reduced.peak / GIB:.1f} GiB",
        f"hold {held.between_batches / GIB:.1f} GiB of gradients between batches and need {held.peak / GIB:.1f} GiB",
    ]


def test_the_sentences_are_the_planners(page):
    text = " ".join(page.split())
    for sentence in sentences(page):
        assert sentence in text, sentence


@pytest.mark.parametrize("name", ["pilot", "mid", "mid_4096", "target", "target_8192"])
def test_recomputed_blocks_are_needed(name, page, capsys):
    _, gpu = without_recomputation(name, page)
    asked = launched(name)
    words = [f"recipes/{name}.yaml", *asked.launch, *asked.model, "--no_simulate"]
    words += ["--gradient_checkpointing", "false", "--gpu", gpu]
    assert main(words) == 2 or "does not fit" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("name", RECIPES)
def test_the_simulated_step_fits_too(name, page):
    """On fake tensors: the peak of the trainer's own step is that of the arithmetic, and fits all three GPUs."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
    question = launched(name).question("--gpu", ",".join(re.findall(r"[\w-]+gb", line)))
    found = simulate(question.config, question.launch, question.step)
    rows = settings(question)
    assert all(verdict(question, rows, gpu, found).fits for gpu in question.gpus)
    assert found.peak == pytest.approx(rows[0].memory.peak, rel=0.15)
