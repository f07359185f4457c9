"""Where torch's operators replaced kernels of a GPU, and why: counted by the model's modules."""

from collections import Counter

from accelerate.utils import gather_object
from torch import nn


def count_fallbacks(model: nn.Module) -> Counter[tuple[str, str]]:
    """Calls by what was computed and why no kernel did it, over all modules of this process."""
    total = Counter()
    for module in model.modules():
        total.update(getattr(module, "kernel_fallbacks", {}))
    return total


class KernelReport:
    """Fallbacks of all processes, row by row and at the end."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._has_kernels = any(hasattr(module, "kernel_fallbacks") for module in model.modules())
        self._total: Counter[tuple[str, str]] = Counter()

    def rows(self) -> dict[str, int]:
        """`kernel/<what>/fallbacks` since the last call; all processes call this together."""
        if not self._has_kernels:
            return {}
        before, self._total = self._total, Counter()
        for part in gather_object([count_fallbacks(self._model)]):
            self._total.update(part)
        rows = Counter()
        for what, reason in self._total:
            rows[f"kernel/{what}/fallbacks"] += self._total[what, reason] - before[what, reason]
        return dict(rows)

    def table(self) -> str:
        """The rows so far added up, with reasons; empty where every kernel ran."""
        if not self._total:
            return ""
        lines = [f"| {what} | {count:,} | {reason} |" for (what, reason), count in self._total.most_common()]
        return "\n".join(["Without kernels of the GPU:", "", "| what | calls | why |", "|---|---|---|", *lines])
