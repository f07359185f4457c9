"""What programs report: tables, pictures, metrics, and where a result comes from."""

import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from .parser import flag_of
from .process import one_line

# The report that hope-hf eval writes and a model card is made from.
RESULTS_FILE = "results.json"
SCHEMA_VERSION = 1

# Flags whose value is a line for the shell, and what is kept instead.
SHELL_LINES = {"checkpoint_hook"}
LEFT_OUT = "(not kept)"

IGNORED = -100
"""The label of a token that is not predicted."""

Row = dict[str, str | int | float | None]
_PACKAGES = (
    "hope_hf", "torch", "transformers", "accelerate", "datasets", "tokenizers", "safetensors", "evaluate", "lm_eval"
)  # fmt: skip


def markdown_table(rows: list[Row]) -> str:
    """Rows as an aligned Markdown table; `x_stderr` joins `x` as `x ± error`."""
    columns = []
    for name in rows[0]:
        if not name.endswith("_stderr"):
            columns.append(_column(name, rows))
    lines = zip(*columns, strict=True)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _column(name: str, rows: list[Row]) -> list[str]:
    """The cells of a column, of one width: its name, the rule and the values; numbers stand on the right."""
    cells = [_cell(row, name) for row in rows]
    width = max(3, len(name), *map(len, cells))
    is_text = any(isinstance(row[name], str) for row in rows)
    align = str.ljust if is_text else str.rjust
    rule = "-" * width if is_text else "-" * (width - 1) + ":"
    return [align(name, width), rule, *(align(cell, width) for cell in cells)]


def can_draw() -> bool:
    """Whether matplotlib is installed; warns if not. Afterwards it can be imported whatever MPLBACKEND is set to.

    Notebooks export their own backend to the processes that they start, and matplotlib fails at import if that backend
    is not installed. Our pictures go to files, without a backend; figures of a program that calls this keep theirs.
    """
    if find_spec("matplotlib") is None:
        warnings.warn("No pictures: matplotlib is not installed (pip install 'hope_hf[plot]').", stacklevel=2)
        return False
    if "matplotlib" not in sys.modules:
        backend = os.environ.pop("MPLBACKEND", None)
        import matplotlib

        if backend is not None:
            os.environ["MPLBACKEND"] = backend
            # some releases refuse a backend that is not installed
            with suppress(ValueError):
                matplotlib.rcParams["backend"] = backend
    return True


def as_label(text: str) -> str:
    """A name of the user's as a label: matplotlib would read `$` as mathematics and hide what begins with `_`."""
    label = text.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


# Model types, and the models of the benchmarks, as their papers call them.
_ARCHITECTURES = {
    "hope": "HOPE", "llama": "Llama", "gpt2": "GPT-2", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "mamba2": "Mamba-2", "gated_deltanet": "gated DeltaNet", "kimi_linear": "Kimi Delta Attention",
    "kimi_delta": "Kimi Delta Attention", "gated_deltanet_2": "Gated DeltaNet-2",
    "sparse_attention": "native sparse attention", "full_attention": "sdpa",
}  # fmt: skip


def architecture(name: str) -> str:
    """The name of a model type for people; an unknown one as it is."""
    return _ARCHITECTURES.get(name, name)


def plain_number(value: float, place: int | None = None) -> str:
    """A tick of an axis without powers of ten, as matplotlib's formatters are called."""
    return f"{value:,.10f}".rstrip("0").rstrip(".") if abs(value) > 1e-9 else f"{value:g}"


def draw_or_warn(draw: Callable[[Path], object], path: Path) -> Path | None:
    """Call `draw(path)`; return `path`, or None and warn of `path` if drawing fails."""
    if not can_draw():
        return None
    try:
        draw(path)
    # matplotlib, a font or the disk may fail; the numbers are worth more than their picture.
    except Exception as error:
        warnings.warn(f"{path} could not be drawn ({one_line(error)}).", stacklevel=2)
        return None
    return path


def provenance() -> dict:
    """The command, the packages' versions and the package's git commit, JSON-able; unknown ones are None."""
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        versions[name] = _installed(name)
    return {
        "command": command_to_keep(),
        "versions": versions,
        "git": {"commit": _git("rev-parse", "HEAD"), "modified": bool(_git("status", "--porcelain"))},
    }


def command_to_keep() -> list[str]:
    """The words of this process's command, without what a shell line among them says: it may hold a password."""
    command = []
    for word in sys.argv:
        flag = flag_of(word)
        if flag in SHELL_LINES and "=" in word:
            word = f"--{flag}={LEFT_OUT}"
        elif command and flag_of(command[-1]) in SHELL_LINES and "=" not in command[-1]:
            word = LEFT_OUT
        command.append(word)
    return command


@contextmanager
def without_arguments() -> Iterator[None]:
    """Inside, `sys.argv` names the program alone: trackers record it, and W&B sends it away.

    The flags that define the run are in the tracker's configuration.
    """
    words = sys.argv
    sys.argv = words[:1]
    try:
        yield
    finally:
        sys.argv = words


def commands_of(record: dict) -> list[list[str]]:
    """The commands of a run's record, first to last, each as words; a run that was changed has several."""
    return record.get("commands") or [record.get("command", [])]


def next_token_accuracy():
    """An `evaluate.Metric` over token ids: `{"accuracy": share of predictions that equal their references}`.

    `add_batch(predictions=..., references=...)` with int64 [n] as often as needed, then `compute()`; or both at once.
    transformers' `run_clm.py` calls this `eval_accuracy`.
    """
    # Slow to import.
    import evaluate
    import torch
    from datasets import Features, Value

    class NextTokenAccuracy(evaluate.Metric):
        def _info(self):
            return evaluate.MetricInfo(
                description="Share of tokens that the model ranks first.",
                citation="",
                features=Features({"predictions": Value("int64"), "references": Value("int64")}),
            )

        def _compute(self, predictions, references):
            return {"accuracy": float((torch.as_tensor(predictions) == torch.as_tensor(references)).double().mean())}

    # A file in the cache would be shared with other processes. `evaluate` makes the cache's folder anyway, which may
    # not be writable.
    with tempfile.TemporaryDirectory() as folder:
        return NextTokenAccuracy(keep_in_memory=True, cache_dir=folder)


def _cell(row: Row, name: str) -> str:
    value = row[name]
    error = row.get(f"{name}_stderr")
    if error is None:
        return _number(value)
    text = f"{error:{_form(value)}}"
    # The error has the digits of its value, unless these are all 0.
    return f"{_number(value)} ± {text if text.strip('0.') else _number(error)}"


def _number(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:{_form(value)}}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _form(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return ".2e"
    return ".4f" if abs(value) < 100 else ",.1f"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(Path(__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
