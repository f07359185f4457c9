"""Draws docs/loss_by_position.png from the table "A book of 64K tokens" of docs/results_paper_rule.md.

Drawn as hope-hf eval draws it:

    python docs/figures/loss_by_position.py

The table has no errors of the losses themselves, which are those of the text: the left panel has no bars.
"""

import re
from pathlib import Path

from hope_hf.evaluation.display import titled
from hope_hf.evaluation.perplexity import CONTROLS, draw

DOCS = Path(__file__).parents[1]


def rows() -> list[dict]:
    """The first table below the heading, in the form of hope-hf eval's results."""
    section = (DOCS / "results_paper_rule.md").read_text(encoding="utf-8").split("## A book of 64K tokens")[1]
    table = re.search(r"(?:^\|.*\|\n)+", section, re.MULTILINE)[0]
    header, _, *lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    found = []
    for cells in lines:
        named = dict(zip(header, cells, strict=True))
        gains = {name: number_and_error(named[f"{title} minus carried"]) for name, title in TITLES.items()}
        losses = {"loss": float(named["carried"]), "frozen": float(named["frozen"])}
        losses["reset_256"] = float(named["reset every 256"])
        losses["window"] = losses["loss"] + gains["window"][0]
        row = {"positions": named["positions"]}
        for name, loss in losses.items():
            row |= {name: loss, f"{name}_stderr": None}
        for name, (gain, error) in gains.items():
            row |= {f"{name}_minus_loss": gain, f"{name}_minus_loss_stderr": error}
        found.append(row)
    return found


def number_and_error(cell: str) -> tuple[float, float | None]:
    """`0.210 ± 0.042` or `-0.0004`."""
    number, _, error = cell.partition(" ± ")
    return float(number), float(error) if error else None


TITLES = dict(zip(CONTROLS, ("frozen", "window", "reset"), strict=True))

if __name__ == "__main__":
    with titled("HOPE, the paper's rule"):
        draw(rows(), DOCS / "loss_by_position.png")
