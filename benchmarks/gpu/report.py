"""Tables and pictures of what run.py measured: `python benchmarks/gpu/report.py FOLDER/gpu.jsonl`.

Prints Markdown for docs/results/full.md, a section per GPU, and draws FOLDER/gpu-PRESET.png. A file that was cut
short, or lacks parts, gives the tables of what it has. In brackets: HOPE's value over the model's.
"""

import json
import sys
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speed_report import draw, number, table
from hope_hf.common.results import can_draw


def read(file: Path) -> list[dict]:
    """The rows of a file; a line that was cut off is left out."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            print(f"left out, not JSON: {line[:80]}", file=sys.stderr)
    return rows


def markdown(head: Iterable[str], lines: Iterable[Iterable[object]]) -> str:
    """A table, or nothing if it has no lines."""
    lines = ["| " + " | ".join(map(str, cells)) + " |" for cells in lines]
    head = list(head)
    return "\n".join(["| " + " | ".join(head) + " |", "|---" * len(head) + "|", *lines]) if lines else ""


def machine(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        if row["measure"] == "machine":
            versions = (f"{name} {version}" for name, version in row["versions"].items() if version)
            driver = f"; driver {row['driver'].strip()}; {row['gib']} GiB" if row.get("driver") else ""
            lines.append(f"Commit {row['git']['commit']}; {', '.join(versions)}{driver}.")
        else:
            lines.append(f"{row['model']}: {number(row['values'][0])} {row['measure']}.")
    return "\n".join(lines)


def kernels(rows: list[dict]) -> str:
    head = ("kernel", "dtype", "width", "text", "logits (torch's)", "worst gradient (torch's)", "")
    return markdown(head, ([
        row["model"], row["dtype"], row["width"], row["text"],
        *(f"{own:.1e} ({twin:.1e})" for own, twin in zip(row["values"], row["torch"], strict=True)),
        f"**wrong**: {', '.join(row['wrong'][:2])}" if row["wrong"] else "right",
    ] for row in rows))  # fmt: skip


def scan(rows: list[dict]) -> str:
    cells = ([row["model"], f"{row['tokens']:,}", row["measure"], number(row["values"][0])] for row in rows)
    return markdown(("alone", "tokens", "measure", "median"), cells)


def by_length(rows: list[dict]) -> str:
    """HOPE's column first."""
    return table(sorted(rows, key=lambda row: row["model"] != "hope"), ranges=True)


def decode(rows: list[dict]) -> str:
    equal = [f"{row['model']}, {row['tokens']:,} tokens: {row['equal']}" for row in rows if "equal" in row]
    return f"{by_length(rows)}\n\nEqual to those of a growing cache: {'; '.join(equal) or 'not compared'}."


def packed(rows: list[dict]) -> str:
    return table([row | {"model": f"{row['model']}{', documents' * row['documents']}"} for row in rows], ranges=True)


def profile(rows: list[dict]) -> str:
    totals = [f"{row['measure']}: {number(row['values'][0])}" for row in rows if "kernel" not in row]
    cells = ([f"`{row['kernel']}`", row["calls"], row["values"][0]] for row in rows if "kernel" in row)
    return f"{'; '.join(totals)}\n\n{markdown(('kernel', 'calls', '% of the time'), cells)}"


def train(rows: list[dict]) -> str:
    measures = list(dict.fromkeys(row["measure"] for row in rows))
    by_tokens = groupby(rows, key=lambda row: row["tokens"])
    found = ((tokens, {row["measure"]: number(row["values"][0]) for row in own}) for tokens, own in by_tokens)
    lines = ([f"{tokens:,}", *(values.get(measure, "") for measure in measures)] for tokens, values in found)
    return markdown(("tokens", *(measure.removeprefix("train/") for measure in measures)), lines)


# title, and the function that writes a table of a part's rows
PARTS: dict[str, tuple[str, Callable[[list[dict]], str]]] = {
    "machine": ("Machine", machine),
    "kernels": ("Kernels against float64", kernels),
    "scan": ("The scan alone", scan),
    "step": ("Training step", by_length),
    "recomputed": ("Training step, every block recomputed", by_length),
    "packed": ("Packed documents", packed),
    "decode": ("Reading and generating", decode),
    "graph": ("A token as a CUDA graph", decode),
    "profile": ("What a training step spends its time on", profile),
    "train": ("The trainer", train),
}


def report(rows: list[dict]) -> str:
    """Markdown of all rows."""
    sections = []
    measured = [row for row in rows if "note" not in row]
    for device in dict.fromkeys(row["device"] for row in measured):
        sections.append(f"# {device}")
        for part, (title, write) in PARTS.items():
            own = [row for row in measured if (row["device"], row["part"]) == (device, part)]
            for preset in dict.fromkeys(row.get("preset") for row in own):
                of_preset = [row for row in own if row.get("preset") == preset]
                sections.append(f"## {title}{f', {preset}' if preset else ''}\n\n{write(of_preset)}")
    about = ("part", "preset", "model", "dtype", "width", "text", "tokens")
    notes = {
        f"- {', '.join(str(row[name]) for name in about if row.get(name))}: {row['note']}": None
        for row in rows
        if "note" in row
    }
    return "\n\n".join([*sections, *(["## What did not run", "\n".join(notes)] if notes else [])])


def main(argv: list[str]) -> None:
    (file,) = map(Path, argv)
    rows = read(file)
    print(report(rows))
    drawn = [row for row in rows if row["part"] in ("step", "decode") and "values" in row]
    drawn.sort(key=lambda row: (row["preset"], row["model"] != "hope"))
    for preset, of_preset in groupby(drawn, key=lambda row: row["preset"]):
        if can_draw():
            draw(list(of_preset), file.with_stem(f"{file.stem}-{preset}").with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
