"""Write the index of the log into README.md: `python docs/log/index.py`. A test compares the page with it."""

import re
from pathlib import Path

FOLDER = Path(__file__).parent
PAGES = ["rule", "levels", "training", "recall", "languages", "sparse", "kernels"]
PAGES += ["engines", "checkpoints", "data", "evaluation", "libraries", "strangers"]
# A question, an answer in bold with its date and status, a number, and where the number is from.
ENTRY = re.compile(
    r"### (?P<question>[^\n]+\?)\n\n\*\*(?P<answer>[^*]+)\*\* \(2026-\d\d-\d\d, "
    r"(?:kept|negative|superseded|open|fixed)\): (?P<number>.+?)\.\n\n(?:Run:|By hand at `|Logged with `|Read in )",
    re.DOTALL,
)


def anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page_with_index() -> str:
    """README.md up to its first table, then a table of each page's entries."""
    lines = [(FOLDER / "README.md").read_text(encoding="utf-8").split("\n## ")[0].rstrip()]
    for name in PAGES:
        text = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
        lines += ["", f"## {text.splitlines()[0][2:]}", "", "| question | outcome | number |", "|---|---|---|"]
        for entry in re.split(r"^(?=### )", text, flags=re.MULTILINE)[1:]:
            found = ENTRY.match(entry)
            if not found:
                raise ValueError(f"{name}.md: this entry lacks its answer, number or source: {entry.splitlines()[0]}")
            question, answer, number = (" ".join(part.split()) for part in found.groups())
            lines.append(f"| [{question}]({name}.md#{anchor(question)}) | {answer} | {number} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (FOLDER / "README.md").write_text(page_with_index(), encoding="utf-8")
