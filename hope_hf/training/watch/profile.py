"""`--profile_steps`: a trace of some steps by torch.profiler, and a table of where their time went."""

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from hope_hf.common.process import warn_once
from hope_hf.common.results import markdown_table

from ..flag_values import parse_profiled

TRACE = "trace_rank{}.json.gz"
STEP = "ProfilerStep#"
"""Begins the names of the spans in a trace that are steps, as torch's own tools have it."""


def check_profiled(named: str | None, total_steps: int) -> None:
    """ValueError if the run ends before the last of the steps."""
    if named and parse_profiled(named)[-1] > total_steps:
        raise ValueError(f"--profile_steps {named}: the run has {total_steps:,} steps, name some of these.")


class StepProfile:
    """Profiles the steps that `--profile_steps` names and the run has still to make.

    Every process writes `trace_rank<N>.json.gz` in `profile-<first>-<last>` of the run's folder, or in a new folder
    with a number behind this name; the first one a table of all of them. A context manager around the training.
    """

    def __init__(
        self, named: str | None, output_dir: str, accelerator: Accelerator, start_step: int, say: Callable[[str], None]
    ):
        """`start_step`: steps made before; `say` prints on the first process."""
        self._named = parse_profiled(named) if named else range(0)
        self._steps = range(max(self._named.start, start_step + 1), self._named.stop)
        if len(self._steps) < len(self._named):
            rest = f"only {_name(self._steps)} is profiled" if self._steps else "nothing is profiled"
            warn_once(f"--profile_steps {named}: the run continues after step {start_step}, {rest}.")
        self._output_dir, self._accelerator, self._say = Path(output_dir), accelerator, say
        self._profile: profile | None = None
        self._step: record_function | None = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._profile is not None:
            self._profile.stop()
            warn_once(f"--profile_steps: the run ended before step {self._steps[-1]} did, so no trace was written.")

    def step_begins(self, step: int) -> None:
        """Called before `step` (from 1) begins."""
        if step not in self._steps:
            return
        if step == self._steps[0]:
            # The shapes show the size of messages.
            self._profile = profile(record_shapes=True)
            self._profile.start()
        self._step = record_function(f"{STEP}{step}")
        self._step.__enter__()

    def step_ends(self, step: int) -> None:
        """Called after `step` has ended."""
        if step not in self._steps:
            return
        if self._accelerator.device.type == "cuda":
            # Kernels that the step has queued belong to it.
            torch.cuda.synchronize()
        self._step.__exit__(None, None, None)
        if step == self._steps[-1]:
            self._profile.stop()
            self._report(self._profile)
            self._profile = None

    def _report(self, finished: profile) -> None:
        name = TRACE.format(self._accelerator.process_index)
        folder = self._new_folder(name)
        finished.export_chrome_trace(str(folder / name))
        rows = gather_object([times(finished, self._accelerator.device)])
        for rank, row in enumerate(rows):
            row["rank"] = rank
        table = f"Steps {_name(self._steps)}, milliseconds a step:\n\n{markdown_table(rows)}\n"
        if self._accelerator.is_main_process:
            (folder / "table.md").write_text(table, encoding="utf-8")
        self._say(f"{table}\nTraces for https://ui.perfetto.dev: {folder}/{TRACE.format('<N>')}")

    def _new_folder(self, name: str) -> Path:
        """A folder without a trace of this process: a run that was killed may repeat steps."""
        first = self._output_dir / f"profile-{_name(self._steps)}"
        folder, number = first, 1
        while (folder / name).exists():
            number += 1
            folder = first.with_name(f"{first.name}.{number}")
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def times(finished: profile, device: torch.device) -> dict[str, int | str]:
    """This process's row of the table: milliseconds of a step, of its operators and of its communication.

    On a GPU these are kernels, and on a CPU torch's operators and gloo's collectives. Communication includes waiting
    for other processes, and may take place while operators compute.
    """
    on_gpu = device.type == "cuda"
    steps, whole, compute, communication = 0, 0.0, 0.0, 0.0
    for event in finished.key_averages():
        # torch leaves out the number
        is_step = event.key.startswith(STEP.rstrip("#"))
        if is_step and event.device_type == DeviceType.CPU:
            steps += event.count
            whole += event.cpu_time_total
        elif is_step or on_gpu != (event.device_type == DeviceType.CUDA):
            continue
        elif "nccl" in event.key.lower() or event.key.startswith("gloo:"):
            communication += event.device_time_total if on_gpu else event.cpu_time_total
        elif on_gpu:
            compute += event.self_device_time_total
        elif event.key.startswith("aten::"):
            compute += event.self_cpu_time_total
    # torch counts microseconds
    milliseconds = {"ms a step": whole, "compute": compute, "communication": communication}
    row: dict[str, int | str] = {"rank": 0}
    for name, total in milliseconds.items():
        row[name] = f"{total / 1000 / steps:,.1f}"
    return row


def _name(steps: range) -> str:
    return f"{steps[0]}-{steps[-1]}"
