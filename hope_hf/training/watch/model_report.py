"""Rows that a model's modules report: mixers, levels, and GPU kernels that were not used."""

from collections import Counter
from contextlib import contextmanager
from functools import partial

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from .metrics_file import ALL


def self_modifying_mixers(model: nn.Module) -> dict[int, nn.Module]:
    """Mixers that report on their memories, by layer."""
    return _by_layer(model, "statistics")


def _by_layer(model: nn.Module, method: str) -> dict[int, nn.Module]:
    """The modules of layers that have a method."""
    modules = {}
    for module in model.modules():
        if hasattr(module, method) and hasattr(module, "layer_idx"):
            modules[module.layer_idx] = module
    return modules


@contextmanager
def memory_statistics(model: nn.Module, rows: dict[str, float | Tensor], enabled: bool):
    """While open, the first forward pass adds `memory/<layer>/<name>` to `rows`, taken from the batch's first row."""
    handles = []
    if enabled:
        hook = partial(_add_statistics, rows, set())
        for mixer in self_modifying_mixers(model).values():
            handles.append(mixer.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _add_statistics(rows: dict, done: set[int], mixer: nn.Module, arguments: tuple, keywords: dict) -> None:
    layer = mixer.layer_idx
    # Recomputation in backward calls this again, after the handle is removed: only the first call counts.
    if layer in done:
        return
    done.add(layer)
    hidden_states = arguments[0] if arguments else keywords["hidden_states"]
    with torch.no_grad():
        statistics = mixer.statistics(hidden_states[:1].detach())
    rows.update(_rows_of(mixer, layer, statistics))


def initial_state_gradients(engine) -> dict[str, float]:
    """Gradient norm of each layer's initial memory states before clipping, by row."""
    rows = {}
    for layer, mixer in self_modifying_mixers(engine.model).items():
        parameters = []
        for module in mixer.modules():
            if getattr(module, "is_initial_state", False):
                parameters += module.parameters()
        norm = engine.gradient_norm(parameters)
        if norm is not None:
            rows |= _rows_of(mixer, layer, {"initial_state_grad_norm": norm})
    return rows


def _rows_of(mixer: nn.Module, layer: int | str, values: dict[str, float | Tensor]) -> dict[str, float | Tensor]:
    return {f"{mixer.metrics}/{layer}/{name}": value for name, value in values.items()}


def level_rows(optimizer, tokens_per_step: int) -> dict[str, int]:
    """Rows of each CMS level: its updates so far, and the tokens since its last update."""
    rows = {}
    for level, report in optimizer.level_report().items():
        rows[f"level/{level}/updates"] = report["updates"]
        rows[f"level/{level}/tokens_since_update"] = report["steps_since_update"] * tokens_per_step
    return rows


# Logged steps in a row after which a mixer's warning is printed.
STEPS = 100


class MixerReport:
    """Rows that mixers sum up over the passes of a logged step; all processes call `rows` together."""

    def __init__(self, model: nn.Module):
        self._mixers = _by_layer(model, "begin_statistics")
        # By layer: what each forward pass has summed up.
        self._passes: dict[int, list[dict]] = {layer: [] for layer in self._mixers}
        self._in_a_row: Counter[int] = Counter()
        self._warnings: list[str] = []

    @contextmanager
    def forward(self, enabled: bool):
        """Context of a forward pass; blocks recomputed in the backward pass are not counted again."""
        if not (enabled and self._mixers):
            yield
            return
        for mixer in self._mixers.values():
            mixer.begin_statistics()
        try:
            yield
        finally:
            for layer, mixer in self._mixers.items():
                self._passes[layer] += mixer.end_statistics()

    def rows(self) -> dict[str, float]:
        """Rows of all tokens since the last call."""
        if not self._mixers:
            return {}
        of_processes = gather_object([self._passes])
        self._passes = {layer: [] for layer in self._mixers}
        rows: dict[str, float] = {}
        self._warnings = []
        # By the first part of the rows' names: a mixer of this kind, and the passes of all its layers.
        kinds: dict[str, nn.Module] = {}
        passes_of_kind: dict[str, list[dict]] = {}
        for layer, mixer in self._mixers.items():
            passes = []
            for by_layer in of_processes:
                passes += by_layer[layer]
            summary = mixer.summary(passes)
            rows |= _rows_of(mixer, layer, summary)
            warning = mixer.warning(summary, STEPS)
            self._in_a_row[layer] = self._in_a_row[layer] + 1 if warning else 0
            if self._in_a_row[layer] == STEPS:
                self._warnings.append(warning)
            kinds.setdefault(mixer.metrics, mixer)
            passes_of_kind.setdefault(mixer.metrics, []).extend(passes)
        for metrics, mixer in kinds.items():
            rows |= _rows_of(mixer, ALL, mixer.summary(passes_of_kind[metrics]))
        return rows

    def warnings(self) -> list[str]:
        """Sentences about the rows of the last call of `rows`."""
        return self._warnings


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
        fallbacks = Counter()
        for module in self._model.modules():
            fallbacks.update(getattr(module, "kernel_fallbacks", {}))
        for counts in gather_object([fallbacks]):
            self._total.update(counts)
        rows = Counter()
        for (what, reason), count in self._total.items():
            rows[f"kernel/{what}/fallbacks"] += count - before[what, reason]
        return dict(rows)

    def table(self) -> str:
        """The sums of all rows so far, with reasons; empty if every kernel ran."""
        if not self._total:
            return ""
        lines = ["Without kernels of the GPU:", "", "| what | calls | why |", "|---|---|---|"]
        for (what, reason), count in self._total.most_common():
            lines.append(f"| {what} | {count:,} | {reason} |")
        return "\n".join(lines)
