"""Where the time of profiled steps went, read from the trace that torch.profiler wrote."""

import gzip
import json
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

from hope_hf.common.results import markdown_table

STEP = "ProfilerStep#"
"""Begins the names of the spans in a trace that are steps, as torch's own tools have it."""
GPU_COPIES = frozenset(("gpu_memcpy", "gpu_memset"))
CPU_COPIES = frozenset(("aten::copy_",))
# Operators of other libraries have their own prefixes; these prefixes mark wrappers of operators or communication.
SHELLS = ("autograd::", "torch::", "c10d::")

Spans = list[tuple[float, float]]


@dataclass(frozen=True)
class Times:
    """Milliseconds per step of one process; the first four add up to the step.

    Attributes:
        compute: kernels on the GPU, or operators on the CPU.
        communication: communication without computation; includes waiting for other processes.
        copies: memory copies while neither of these runs.
        waiting: time while none of these runs.
        hidden: communication during computation.
    """

    compute: float
    communication: float
    copies: float
    waiting: float
    hidden: float

    @property
    def step(self) -> float:
        return self.compute + self.communication + self.copies + self.waiting


def read_events(file: Path) -> list[dict]:
    """The events of a gzipped trace."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return json.load(opened)["traceEvents"]


def read_times(file: Path) -> Times:
    """The times in a gzipped trace with at least one step."""
    return times(read_events(file))


def times(events: list[dict]) -> Times:
    """The times of a trace's events (in microseconds): those of the GPU if it computed anything, else of the CPU."""
    spans = [event for event in events if event.get("ph") == "X"]
    steps = [e for e in spans if e["cat"] == "user_annotation" and e["name"].startswith(STEP)]
    windows = sorted(map(_span, steps))
    kernels = [event for event in spans if event["cat"] == "kernel"]
    layers = _gpu_layers(spans, kernels) if kernels else _cpu_layers(spans, {step["tid"] for step in steps})
    parts = dict.fromkeys(("compute", "communication", "copies"), 0.0)
    covered: Spans = []
    for name, layer in layers:
        before = _length(covered)
        covered = _joined(covered + _within(layer, windows))
        parts[name] += _length(covered) - before
    parts["waiting"] = _length(windows) - _length(covered)
    sent = _within([event for name, layer in layers if name == "communication" for event in layer], windows)
    parts["hidden"] = _length(sent) - parts["communication"]
    return Times(**{name: length / 1000 / len(windows) for name, length in parts.items()})


def _gpu_layers(spans: list[dict], kernels: list[dict]) -> list[tuple[str, list[dict]]]:
    """Events by kind; if several run at the same time, the first kind counts."""
    return [
        ("compute", [kernel for kernel in kernels if "nccl" not in kernel["name"].lower()]),
        ("communication", [kernel for kernel in kernels if "nccl" in kernel["name"].lower()]),
        ("copies", [event for event in spans if event["cat"] in GPU_COPIES]),
    ]


def _cpu_layers(spans: list[dict], threads: set) -> list[tuple[str, list[dict]]]:
    """Events by kind, as `_gpu_layers`. Operators contain others: sending and copying come before computing.

    Only operators of the step's own `threads` count: gloo's threads copy and add up what they receive.
    """
    operators = [event for event in spans if event["cat"] == "cpu_op" and event["tid"] in threads]
    return [
        ("communication", [event for event in operators if event["name"].startswith("c10d::")]),
        ("copies", [event for event in operators if event["name"] in CPU_COPIES]),
        ("compute", [e for e in operators if "::" in e["name"] and not e["name"].startswith(SHELLS)]),
        ("communication", [event for event in spans if event["name"].startswith("gloo:")]),
    ]


def times_table(rows: list[Times]) -> str:
    """A row per process, in the order of their ranks."""

    def cell(row: Times, value: float) -> str:
        return f"{value:,.1f} ({100 * value / row.step:.0f} %)"

    return markdown_table(
        [
            {
                "rank": rank,
                "ms a step": f"{row.step:,.1f}",
                "compute": cell(row, row.compute),
                "communication": cell(row, row.communication),
                "memory copies": cell(row, row.copies),
                "waiting": cell(row, row.waiting),
                "hidden communication": cell(row, row.hidden),
            }
            for rank, row in enumerate(rows)
        ]
    )


def _span(event: dict) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _within(events: list[dict], windows: Spans) -> Spans:
    """The spans of events that begin in a window, cut at its end, joined."""
    starts = [start for start, _ in windows]
    found = []
    for start, end in map(_span, events):
        index = bisect_right(starts, start) - 1
        if index >= 0 and start < windows[index][1]:
            found.append((start, min(end, windows[index][1])))
    return _joined(found)


def _joined(spans: Spans) -> Spans:
    """Sorted, and free of overlaps."""
    joined: Spans = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _length(spans: Spans) -> float:
    return sum(end - start for start, end in spans)
