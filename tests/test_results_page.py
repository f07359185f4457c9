"""docs/results.md has the figures of docs/results/*.jsonl, and README has those of docs/results.md."""

import importlib.util
import re
import statistics
from pathlib import Path

import pytest

from benchmarks.mad import Job
from benchmarks.quality.models import SIZES, build
from benchmarks.quality.results import settings

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("tables", ROOT / "docs/results/tables.py")
tables = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(tables)
README = (ROOT / "README.md").read_text(encoding="utf-8")
FULL = (ROOT / "docs/results/full.md").read_text(encoding="utf-8")


def row(start: str) -> list[str]:
    """The cells of the row of README's table whose first cell has these words, without marks."""
    (line,) = [line for line in README.splitlines() if re.match(rf"\| [^|]*{re.escape(start)}", line)]
    return [cell.strip() for cell in line.replace("*", "").strip("| ").split("|")]


@pytest.mark.parametrize("page", tables.PAGES, ids=lambda page: page.name)
def test_the_page_is_what_the_script_writes(page):
    assert tables.rendered(page) == page.read_text(encoding="utf-8")


def test_a_later_call_counts_the_published_rows():
    """Their hashes are of today's models: a new field of the config, or another default, does not part them."""
    small = SIZES["small"]
    for name, line in (("hope", "HOPE"), ("hope_frozen", "HOPE, trained with frozen memories"), ("llama", "Llama")):
        assert settings(build(name, small), small) == tables.SMALL[line][0]
    for line in ("HOPE", "memories, then sparse attention", "Llama"):
        name, published = tables.RECALL[line]
        assert Job("mqar", name, 3e-3, 1).settings == published


@pytest.mark.parametrize("text", tables.TEXTS)
def test_readmes_losses_are_means_of_three_seeds(text):
    """HOPE's, and those of the recurrent peer with the lowest mean."""
    losses = {name: tables.losses(key, text).values() for name, key in tables.SMALL.items()}
    means = {name: statistics.mean(found) for name, found in losses.items() if len(found) == 3}
    best = min(means.keys() & tables.PEERS.keys(), key=means.get)
    hope, peer = row(tables.TEXTS[text])[1:3]
    assert hope == tables.spread(losses["HOPE"], 3) and peer == f"{tables.spread(losses[best], 3)} {best}"


def test_readmes_recall_is_that_of_the_seeds():
    models = {"HOPE": 1, "gated DeltaNet": 2}
    for name, column in models.items():
        rows = [row for row in tables.read("mad") if (row["model"], row["settings"]) == tables.RECALL[name]]
        seeds = {row["seed"]: row["accuracy"] for row in rows if (row["task"], row["learning_rate"]) == ("mqar", 3e-3)}
        shares = " / ".join(f"{100 * seeds[seed][-1]:.1f}" for seed in sorted(seeds))
        assert shares in row("64 key-value pairs")[column]


def test_readmes_other_figures_stand_on_the_page():
    text = " ".join(README.split())
    assert "1.8 % (Python sources: 5.3 %)" in text and "worth 1.8 %** (mean of three seeds), on Python sources" in FULL
    for reading, words in (("original, full attention, learning", "by {}"), ("window, frozen", "costs {}")):
        change = re.search(rf"tokens, {reading} \|[^(]*\([+-]([\d.]+) %\)", FULL)[1]
        assert words.format(f"{float(change):.1f} %") in text
