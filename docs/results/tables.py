"""Write tables of docs/results.md and of full.md from the files beside this one: `python docs/results/tables.py`.

A block of a page between `<!-- table: NAME -->` and `<!-- end -->` is what the function NAME returns. A test
compares the pages with it. A line of a table names its trainings by `settings`, the hash of model, size and flags that
every row has, and by the learning rate.
"""

import json
import re
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import speed_report  # noqa: E402
from benchmarks.levels.report import table as levels_table  # noqa: E402
from hope_hf.common.results import architecture  # noqa: E402

PAGES = [ROOT / "docs/results.md", ROOT / "docs/results/full.md"]
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
TEXTS = {"builtin": "Python sources", "tinyshakespeare": "tinyshakespeare", "moby_dick": "Moby Dick"}
HOPE = ("de73809f142f", 1.6e-2)
# as it was until 2026-11-27, with queries that begin as the keys of the same token
HOPE_BEFORE = ("f6eea1f52377", 1.6e-2)
SMALL = {
    "HOPE": HOPE,
    "HOPE, trained with frozen memories": ("4a527a5a5b79", 1.6e-2),
    "HOPE, the paper's rule": ("c8e4c073f3fc", 1.6e-2),
    "Mamba-2": ("8fa016254e05", 1.6e-2),
    "gated DeltaNet": ("014265894292", 8e-3),
    "Kimi Delta Attention": ("4d167a2f4c69", 8e-3),
    "Gated DeltaNet-2": ("9dd1f54a03d2", 8e-3),
    "Llama with convolutions": ("6aca87eb4be5", 8e-3),
    "Llama": ("d781d1cb8fe7", 2e-3),
    "Hope-Attention: softmax instead of memories": ("5b5ce2c8f794", 2e-3),
}
PEERS = {name: SMALL[name] for name in list(SMALL)[3:9]}
HYBRIDS = [
    ("2 layers: memories", HOPE_BEFORE),
    ("2 layers: memories, sparse attention", ("ac97b2bf2e14", 1.6e-2)),
    ("2 layers: frozen memories, sparse attention", ("a75b96bf7b81", 1.6e-2)),
    ("2 layers: sparse attention alone", ("76a1d04db936", 2e-3)),
    ("2 layers: softmax attention alone", ("5b5ce2c8f794", 2e-3)),
    ("4 layers: memories", ("cc15793c1a0c", 1.6e-2)),
    ("4 layers: memories", ("cc15793c1a0c", 8e-3)),
    ("4 layers: three of memories, one of sparse attention", ("25252074269f", 1.6e-2)),
    ("4 layers: three of memories, one of sparse attention", ("25252074269f", 8e-3)),
    ("4 layers: three of frozen memories, one of sparse attention", ("04fa8b9f7090", 1.6e-2)),
    ("4 layers: three of frozen memories, one of sparse attention", ("04fa8b9f7090", 8e-3)),
]
SELF_MODIFYING = [
    ("HOPE", HOPE),
    ("keys and values remade by memories, at a tenth of the rate", ("fd5d5a2fda1c", 1.6e-2)),
    ("HOPE, queries begin as the keys of the same token", HOPE_BEFORE),
    ("the same, keys and values remade by memories, at the full rate", ("d4d3adeb060a", 1.6e-2)),
]
MEDIUM = [
    ("HOPE", ("accd946f626b", 4e-3)),
    ("HOPE", ("accd946f626b", 8e-3)),
    ("HOPE, queries begin as the keys of the same token", ("920badb156fd", 4e-3)),
    ("HOPE with an erase gate (`[4, 4]`)", ("3dafb9da4bcc", 4e-3)),
    ("HOPE with an erase gate (`[4, 4]`)", ("3dafb9da4bcc", 8e-3)),
    ("three layers of memories, one of sparse attention", ("e7a47c6d0ab3", 4e-3)),
    ("three layers of memories, one of sparse attention", ("d24af1605ff1", 2e-3)),
    ("three layers of frozen memories, one of sparse attention", ("fb9c7d95bfc3", 4e-3)),
    ("HOPE, the paper's rule", ("0c8221e9c60e", 4e-3)),
    ("HOPE, the paper's rule, trained with frozen memories", ("87cb1b2469fc", 4e-3)),
    ("Mamba-2", ("6847c1fbf490", 1.6e-2)),
    ("gated DeltaNet", ("6432d766ddd5", 2e-3)),
    ("Llama with convolutions", ("6c1de2b87b83", 2e-3)),
    ("Hope-Attention: softmax instead of memories", ("d31472db4703", 1e-3)),
    ("Llama", ("e5294d5b5957", 1e-3)),
]
# The model's name in mad.jsonl and its settings.
RECALL = {
    "HOPE": ("hope", "403356d52306"),
    "HOPE, the paper's rule": ("hope", "0a206aaf1554"),
    "the same, trained with frozen memories": ("hope_frozen", "2a0c53aed7aa"),
    "Mamba-2": ("mamba2", "3f1dc302e2d6"),
    "gated DeltaNet": ("gated_deltanet", "2695362ec569"),
    "Llama": ("llama", "085b67c85c2f"),
    "Llama with convolutions": ("llama_conv", "c713cf476b60"),
    "memories, then sparse attention": ("hope_hybrid", "55b7f6d3db33"),
    "the same, a quarter of 512 tokens selected": ("hope_hybrid_quarter", "90364559c3f1"),
}
LENGTHS = ("4 pairs, 32 tokens", "8, 64", "16, 128", "32, 256", "64, 512")
# In the table of MAD: as it was until 2026-11-27.
MAD_BEFORE = {"memories, then sparse attention": ("hope_hybrid", "48ca2d38ff40")}
MAD = {"mad-recall": "recall", "mad-fuzzy-recall": "fuzzy recall", "mad-selective-copying": "selective copying"}


def read(name: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / f"docs/results/{name}.jsonl").read_text("utf-8").splitlines()]


def losses(trainings: tuple[str, float], text: str) -> dict[int, float]:
    """Validation loss by seed; of two rows of a run the later."""
    rows = (row for row in read("quality") if (row["settings"], row["learning_rate"]) == trainings)
    return {row["seed"]: row["eval_loss"] for row in rows if row["text"] == text}


def ratios(trainings: tuple[str, float], text: str) -> dict[int, float]:
    """HOPE's loss over that of other trainings, by the seeds that both have."""
    own, other = losses(HOPE, text), losses(trainings, text)
    return {seed: own[seed] / other[seed] for seed in own if seed in other}


def cell(by_seed: dict[int, float]) -> str:
    """The first seed, and in brackets mean and standard deviation where there are more."""
    if not by_seed:
        return "not run"
    return f"{by_seed[1]:.4f}" + (f" ({spread(by_seed.values(), 4)})" if len(by_seed) > 1 else "")


def spread(values: Iterable[float], digits: int) -> str:
    values = list(values)
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{deviation}"


def rate(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *lines])


def of_quality(lines: Iterable[tuple[str, tuple[str, float]]]) -> str:
    """Rates (of matrices, and of vectors if they have their own) and losses of trainings on the three texts."""
    vectors = {(row["settings"], row["learning_rate"]): row.get("vector_learning_rate") for row in read("quality")}
    cells = []
    for name, key in lines:
        rates = rate(key[1]) + (f" / {rate(vectors[key])}" if vectors[key] else "")
        cells.append([name, rates, *(cell(losses(key, text)) for text in TEXTS)])
    return table(["model", "learning rate", *TEXTS.values()], cells)


def small() -> str:
    return of_quality(SMALL.items())


def over_peers() -> str:
    over = {"its twin trained with frozen memories": SMALL["HOPE, trained with frozen memories"]} | PEERS
    lines = ([name, *(cell(ratios(key, text)) for text in TEXTS)] for name, key in over.items())
    return table(["HOPE's loss over that of", *TEXTS.values()], lines)


def hybrids() -> str:
    return of_quality(HYBRIDS)


def self_modifying() -> str:
    return of_quality(SELF_MODIFYING)


def medium() -> str:
    return of_quality(MEDIUM)


def recalled(model: tuple[str, str], task: str) -> list[str]:
    """Right answers in per cent by length: mean and standard deviation over seeds, at the rate 3e-3."""
    rows = [row for row in read("mad") if (row["model"], row["settings"]) == model and row["task"] == task]
    seeds = {row["seed"]: row["accuracy"] for row in rows if row["learning_rate"] == 3e-3}
    return [spread((100 * share for share in shares), 1) for shares in zip(*seeds.values(), strict=True)]


def recall() -> str:
    found = {name: recalled(model, "mqar") for name, model in RECALL.items()}
    return table(["model", *LENGTHS], ([name, *cells] for name, cells in found.items() if cells))


def mad() -> str:
    models = RECALL | MAD_BEFORE
    lines = ([name, *("".join(recalled(model, task)) or "not run" for task in MAD)] for name, model in models.items())
    return table(["model", *MAD.values()], lines)


def by_length(*measures: str) -> str:
    found = speed_report.table([row for row in read("speed") if row["measure"] in measures])
    head, rest = found.split("\n", 1)
    head = re.sub(r"\w+", lambda name: architecture(name[0]), head)
    return f"{head}\n{rest}".replace("|  ", "| not run ")


def speed() -> str:
    return by_length("step", "prefill", "token")


def memory() -> str:
    return by_length("cache", "peak")


def levels() -> str:
    return levels_table(read("levels"))


def rendered(page: Path) -> str:
    """The page with its blocks written anew."""

    def block(found: re.Match) -> str:
        return f"{found[1]}{globals()[found[2]]()}\n{found[3]}"

    return BLOCK.sub(block, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(rendered(page), encoding="utf-8")
