"""What the layers of sparse attention do: `sparse/<layer>/<name>` of a step's tokens, over all processes."""

from collections import Counter
from contextlib import contextmanager

from accelerate.utils import gather_object
from torch import nn

# Of all layers together.
ALL = "all"
# Logged steps in a row after which a collapsed gate is worth a sentence, and the share of tokens and heads.
STEPS, SHARE = 100, 0.5


class SparseReport:
    """Rows of the steps that are logged; all processes call `rows` together."""

    def __init__(self, model: nn.Module):
        self._mixers = {m.layer_idx: m for m in model.modules() if hasattr(m, "sparse_statistics")}
        self._parts: dict[int, list[dict]] = {layer: [] for layer in self._mixers}
        self._collapsed: Counter[int] = Counter()

    @contextmanager
    def forward(self, enabled: bool):
        """Around a forward pass: what is recomputed in the backward pass is not counted again."""
        if not (enabled and self._mixers):
            yield
            return
        for mixer in self._mixers.values():
            mixer.begin_statistics()
        try:
            yield
        finally:
            for layer, mixer in self._mixers.items():
                self._parts[layer] += mixer.end_statistics()

    def rows(self) -> dict[str, float]:
        """Of all tokens since the last call."""
        if not self._mixers:
            return {}
        parts: dict[int, list[dict]] = {layer: [] for layer in self._mixers}
        for of_process in gather_object([self._parts]):
            for layer, found in of_process.items():
                parts[layer] += found
        self._parts = {layer: [] for layer in self._mixers}
        rows = {}
        for layer, mixer in self._mixers.items():
            found = summary(parts[layer], mixer.sizes.block)
            rows |= {f"sparse/{layer}/{name}": value for name, value in found.items()}
            self._collapsed[layer] = self._collapsed[layer] + 1 if found["gate_collapse_fraction"] > SHARE else 0
        together = summary([part for found in parts.values() for part in found], mixer.sizes.block)
        return rows | {f"sparse/{ALL}/{name}": value for name, value in together.items()}

    def warnings(self) -> list[str]:
        """Sentences about layers whose gates have collapsed, each once."""
        return [
            f"sparse attention of layer {layer} reads one branch: in the last {STEPS} logged steps the largest of "
            f"most gates had more than 0.95 of their sum (sparse/{layer}/gate_collapse_fraction)"
            for layer, steps in self._collapsed.items()
            if steps == STEPS
        ]


def summary(parts: list[dict], block: int) -> dict[str, float]:
    """The rows of parts that `SparseStatistics` has summed up, in any order and however they were cut.

    Args:
        block: tokens of a block.
    """

    def total(name: str) -> float:
        return sum(part[name] for part in parts)

    gates, rows = max(1, total("gates")), max(1, total("rows"))
    shares = [sum(share) / gates for share in zip(*(part["shares"] for part in parts), strict=True)]
    distances = Counter()
    for part in parts:
        distances.update(dict(enumerate(part["distances"])))
    return {
        "gate_entropy_mean": total("entropy") / gates,
        "gate_entropy_min": min(part["entropy_min"] for part in parts),
        "gate_max": max(part["gate_max"] for part in parts),
        "gate_collapse_fraction": total("collapsed") / gates,
        **dict(zip(("share_compressed", "share_selected", "share_window"), shares, strict=True)),
        "rows": total("rows"),
        "k_mean": total("k") / rows,
        "k_max": max(part["k_max"] for part in parts),
        "k_at_max_percent": 100 * total("k_at_max") / rows,
        "selected_distance_median": block * _quantile(distances, 0.5),
        "selected_distance_p95": block * _quantile(distances, 0.95),
    }


def _quantile(counts: Counter[int], share: float) -> int:
    """The smallest value below or at which that share of the counts lies."""
    wanted, below = share * counts.total(), 0
    for value in sorted(counts):
        below += counts[value]
        if below >= wanted:
            return value
    return 0
