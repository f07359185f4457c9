"""Measurements of a run: speed, memory, and the activity of the model's memories and levels."""

import resource
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hope_hf.step.gpus import GIB


class Stopwatch:
    """Training seconds, of which data loading; evaluation, checkpoints and first steps stay outside the averages."""

    WARM_UP_STEPS = 3

    def __init__(self):
        self._interval = [0.0, 0.0, 0]  # seconds, data seconds, tokens since the last log
        self._steady = [0.0, 0]  # seconds and steps, without the first steps
        self._steps = 0
        self._data = 0.0

    def step_begins(self):
        self._start, self._data = time.perf_counter(), 0.0

    @contextmanager
    def loading(self):
        """Time spent inside counts as waiting for data."""
        start = time.perf_counter()
        yield
        self._data += time.perf_counter() - start

    def step_ends(self, tokens: int) -> tuple[float, float]:
        """Returns the seconds of this step, and those of them spent waiting for data."""
        seconds = time.perf_counter() - self._start
        self._steps += 1
        for index, value in enumerate((seconds, self._data, tokens)):
            self._interval[index] += value
        if self._steps > self.WARM_UP_STEPS:
            self._steady[0] += seconds
            self._steady[1] += 1
        return seconds, self._data

    def read(self, steps_left: int) -> dict[str, float]:
        """Speed rows since the last call, and the time left."""
        seconds, data_seconds, tokens = self._interval
        steady_seconds, steady_steps = self._steady
        per_step = steady_seconds / steady_steps if steady_steps else seconds
        self._interval = [0.0, 0.0, 0]
        return {
            "train/tokens_per_second": tokens / seconds,
            "train/data_loading_percent": 100 * data_seconds / seconds,
            "train/eta_seconds": per_step * steps_left,
        }


def peak_memory_gib(device: torch.device) -> float:
    """Largest memory so far of this process: reserved by torch on a GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device) / GIB
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB


def utilization_meter(device: torch.device) -> Callable[[], int] | None:
    """A function that reads a GPU's recent utilization in percent; None if it is not available.

    Not available: without GPU, without the package `nvidia-ml-py`, on a part of a GPU. This is checked once.
    """
    if device.type != "cuda":
        return None

    def read() -> int:
        return torch.cuda.utilization(device)

    try:
        read()
    # The driver has its own error types.
    except Exception:
        return None
    return read


def self_modifying_mixers(model: nn.Module) -> dict[int, nn.Module]:
    """Mixers that report on their memories, by layer."""
    return {m.layer_idx: m for m in model.modules() if hasattr(m, "statistics") and hasattr(m, "layer_idx")}


@contextmanager
def memory_statistics(model: nn.Module, rows: dict[str, float | Tensor], enabled: bool):
    """While open, the first forward pass adds `memory/<layer>/<name>` to `rows`, taken from the batch's first row."""
    handles = []

    def record(layer, mixer):
        def hook(module, arguments, keywords):
            # Recomputation in backward calls this again, after the handle is removed: only the first call counts.
            hidden_states = arguments[0] if arguments else keywords["hidden_states"]
            if f"memory/{layer}/state_norm_ratio" in rows:
                return
            with torch.no_grad():
                statistics = mixer.statistics(hidden_states[:1].detach())
            rows.update({f"memory/{layer}/{name}": value for name, value in statistics.items()})

        return hook

    if enabled:
        for layer, mixer in self_modifying_mixers(model).items():
            handles.append(mixer.register_forward_pre_hook(record(layer, mixer), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def initial_state_gradients(engine) -> dict[str, float]:
    """Per layer, the gradient norm of its memories' initial states: the teach signal, before clipping."""
    rows = {}
    for layer, mixer in self_modifying_mixers(engine.model).items():
        states = [m for m in mixer.modules() if getattr(m, "is_initial_state", False)]
        norm = engine.gradient_norm([parameter for state in states for parameter in state.parameters()])
        if norm is not None:
            rows[f"memory/{layer}/initial_state_grad_norm"] = norm
    return rows


def level_rows(optimizer, tokens_per_step: int) -> dict[str, int]:
    """Per CMS level: its updates so far and the tokens seen since the last one."""
    rows = {}
    for level, report in optimizer.level_report().items():
        rows[f"level/{level}/updates"] = report["updates"]
        rows[f"level/{level}/tokens_since_update"] = report["steps_since_update"] * tokens_per_step
    return rows
