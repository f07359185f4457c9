"""Speed and memory of HOPE and its peers on a CPU, by length of the text: a table, a file and a picture.

    python benchmarks/peers_speed.py --output_dir runs/speed                     all of it
    python benchmarks/peers_speed.py --output_dir runs/speed --lengths 512 2048  less
    python benchmarks/peers_speed.py --output_dir runs/speed --report            the table and picture of a file

| measure | what |
|---|---|
| step | CPU seconds of forward and backward of one text |
| prefill | CPU seconds of reading it into a cache, without gradients |
| token | CPU milliseconds of a token generated after it |
| cache | MiB that the model has to carry after it |
| peak | MiB that a training step needs beside the model, in a process of its own |

Models of equal parameters (`benchmarks/step.py`), in turn in one process, medians over rounds. Peers run on
transformers' torch code, as everywhere without a GPU.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.quality_models import HOPE, LLAMA, MODELS, Size, build
from benchmarks.step import Decoder, default_size, in_turn, step_seconds

DEFAULT_MODELS = (HOPE, LLAMA, "mamba2", "gated_deltanet", "kimi_linear")
MEASURES = {"step": "s", "prefill": "s", "token": "ms", "cache": "MiB", "peak": "MiB"}
# transformers' Mamba-2 without kernels builds a tensor of 256 x heads x state numbers a token.
MOST_TOKENS = {"mamba2": 8192}
MIB = 2**20


def size(options: argparse.Namespace) -> Size:
    """That of `benchmarks/step.py`, its peers 1 % larger: Kimi Delta Attention cannot be as small as HOPE there."""
    default = default_size(options.vocab_size)
    return replace(default, parameters=round(1.01 * default.parameters))


def held_bytes(cache) -> int:
    """Bytes of all tensors that a cache of any kind refers to, each storage once."""
    storages, seen, pending = {}, set(), [cache]
    while pending:
        part = pending.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, torch.Tensor):
            storage = part.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(part, dict):
            pending.extend(part.values())
        elif isinstance(part, (list, tuple)):
            pending.extend(part)
        elif type(part).__module__.startswith(("transformers.", "hope_hf.", "benchmarks.")):
            pending.extend(vars(part).values())
    return sum(storages.values())


def prefill_seconds(network: torch.nn.Module, input_ids: torch.Tensor) -> float:
    return Decoder(network, input_ids).prefill_seconds


def peak_bytes(name: str, length: int, options: argparse.Namespace) -> int:
    """What a training step takes beside the model, measured in a process of its own."""
    program = [sys.executable, __file__, "--output_dir", options.output_dir, "--peak_of", name]
    program += ["--lengths", str(length), "--vocab_size", str(options.vocab_size)]
    return int(subprocess.run(program, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(options: argparse.Namespace) -> None:
    """Print the bytes by which the process grows in a step; a short step before it has loaded what is loaded once."""
    network = build(options.peak_of, size(options)).new()
    for length in (8, *options.lengths):
        input_ids = torch.randint(options.vocab_size, (1, length))
        grown = peak_growth(partial(step_seconds, network, input_ids))
    print(grown)


def peak_growth(function: Callable[[], object]) -> int:
    """Bytes by which this process grows at most while the function runs (Linux)."""
    # the largest memory so far becomes that of now
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident_kib("VmRSS")
    function()
    return (_resident_kib("VmHWM") - before) * 1024


def _resident_kib(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def measure(options: argparse.Namespace, file: Path) -> None:
    """Add a row for every model, length and measure to the file: `{"model", "tokens", "measure", "values"}`."""
    networks = {name: build(name, size(options)).new() for name in options.models}

    def add(name: str, tokens: int, measure: str, values: list[float]) -> None:
        row = {"model": name, "tokens": tokens, "measure": measure, "values": [round(value, 5) for value in values]}
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    for length in sorted({*options.lengths, *options.contexts}):
        print(f"{length:,} tokens", file=sys.stderr, flush=True)
        input_ids = torch.randint(options.vocab_size, (1, length))
        fitting = {name: net for name, net in networks.items() if length <= MOST_TOKENS.get(name, length)}
        timed = {}
        if length in options.lengths:
            timed["step"] = {name: partial(step_seconds, net, input_ids) for name, net in fitting.items()}
        if length in options.contexts:
            timed["prefill"] = {name: partial(prefill_seconds, net, input_ids) for name, net in fitting.items()}
        for measure, functions in timed.items():
            for name, seconds in in_turn(functions, options.rounds).items():
                add(name, length, measure, seconds)
        if length in options.contexts:
            decoders = {name: Decoder(net, input_ids) for name, net in fitting.items()}
            for name, decoder in decoders.items():
                add(name, length, "cache", [held_bytes(decoder.cache) / MIB])
            for name, seconds in in_turn(decoders, options.new_tokens).items():
                add(name, length, "token", [1e3 * second for second in seconds])
            del decoders
        if length in options.lengths:
            for name in fitting:
                add(name, length, "peak", [peak_bytes(name, length, options) / MIB])


def report(rows: list[dict], picture: Path) -> None:
    """Print the table, with HOPE's value over the model's in brackets, and draw the picture."""
    # of what was measured again the last
    medians = {(row["model"], row["tokens"], row["measure"]): statistics.median(row["values"]) for row in rows}
    models = list(dict.fromkeys(row["model"] for row in rows))
    print(f"| measure | tokens | {' | '.join(models)} |\n{'|---' * (len(models) + 2)}|")
    for measure, unit in MEASURES.items():
        for tokens in sorted({row["tokens"] for row in rows if row["measure"] == measure}):
            cells = []
            for model in models:
                value, hope = (medians.get((name, tokens, measure)) for name in (model, HOPE))
                ratio = "" if model == HOPE or not value or not hope else f" ({hope / value:.2f})"
                cells.append("" if value is None else f"{value:.3g}{ratio}")
            print(f"| {measure}, {unit} | {tokens:,} | " + " | ".join(cells) + " |")
    draw(medians, models, picture)


def draw(medians: dict, models: list[str], picture: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter

    figure = Figure(figsize=(11, 6.4), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for axes, (measure, unit) in zip(panels, MEASURES.items(), strict=False):
        for model in models:
            points = sorted((key[1], value) for key, value in medians.items() if key[::2] == (model, measure))
            width = 2.5 if model == HOPE else 1.2
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=model, linewidth=width)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", title=f"{measure} ({unit})", xlabel="tokens of the text")
        axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens:g}" if tokens < 1024 else f"{tokens / 1024:g}K")
        axes.yaxis.set_major_formatter(LogFormatter())
        axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))
        axes.grid(alpha=0.3)
    last = list(figure.axes)[-1]
    last.axis("off")
    last.legend(*figure.axes[0].get_legend_handles_labels(), loc="center", frameon=False)
    figure.savefig(picture, dpi=110)
    print(f"\n{picture}")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="of speed.jsonl, to which rows are added, and speed.png")
    parser.add_argument("--models", nargs="+", default=DEFAULT_MODELS, choices=MODELS)
    lengths = [2**power for power in range(9, 15)]
    parser.add_argument("--lengths", type=int, nargs="*", default=lengths, help="tokens of a training step")
    parser.add_argument("--contexts", type=int, nargs="*", help="tokens read before a token is generated")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after one to warm up")
    parser.add_argument("--new_tokens", type=int, default=30, help="tokens generated")
    parser.add_argument("--vocab_size", type=int, default=8192)
    parser.add_argument("--report", action="store_true", help="measure nothing")
    parser.add_argument("--peak_of", choices=MODELS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.contexts is None:
        options.contexts = [*options.lengths, 2 * max(options.lengths, default=0)]
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    if options.peak_of:
        return print_peak(options)
    folder = Path(options.output_dir)
    file = folder / "speed.jsonl"
    if not options.report:
        folder.mkdir(parents=True, exist_ok=True)
        measure(options, file)
    elif not file.is_file():
        parser.error(f"--report: {file} is missing: run this without --report first")
    report([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()], folder / "speed.png")


if __name__ == "__main__":
    main()
