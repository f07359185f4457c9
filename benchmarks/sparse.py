"""Speed and memory of sparse attention beside torch's attention (sdpa) by length, on one CPU thread.

    python benchmarks/sparse.py --output_dir runs/sparse               the mixers alone, forward and backward
    python benchmarks/sparse.py --output_dir runs/sparse --decode      a generated token of the preset tiny-hybrid
    python benchmarks/sparse.py --output_dir runs/sparse --flex        its selected blocks beside flex_attention
    python benchmarks/sparse.py --output_dir runs/sparse --report      the tables of what was measured, and the picture

Both mixers have width 256, four heads of 64 that share one key head, and one text; they take turns. A peak is what
forward and backward need beside the mixer and its input, in a process of its own.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers_speed import peak_growth
from benchmarks.step import Decoder
from hope_hf import HopeConfig, HopeForCausalLM, HopeModel
from hope_hf.model.inputs import Documents
from hope_hf.model.sparse_fast import read_selected

SPARSE, SDPA = "sparse_attention", "full_attention"
LENGTHS = (1024, 2048, 4096, 8192, 16_384, 32_768)
CONTEXTS = (1024, 32_768)
WIDTH = 256


def layer(kind: str) -> HopeModel:
    """A model of one layer, of which the mixer is measured."""
    torch.manual_seed(0)
    config = HopeConfig(
        vocab_size=8, hidden_size=WIDTH, num_hidden_layers=1, num_key_value_heads=1, layer_types=[kind],
        level_intermediate_sizes=[8] * 3,
    )  # fmt: skip
    return HopeModel(config)


def step_seconds(model: HopeModel, hidden_states: torch.Tensor) -> float:
    """CPU seconds of forward and backward of the mixer."""
    mixer, length = model.layers[0].mixer, hidden_states.shape[1]
    positions = torch.arange(length)[None]
    if model.config.has_sparse_attention:
        context, _ = model._plans(hidden_states, None, Documents(None, None), None)
    else:
        angles = model.rotary_emb(hidden_states, position_ids=positions)
        context = {"attention_mask": None, "position_embeddings": angles}
    start = time.process_time()
    mixer(hidden_states, **context)[0].sum().backward()
    return time.process_time() - start


def print_flex(lengths: list[int], rounds: int) -> None:
    """CPU seconds of reading selected blocks, forward alone (flex_attention has no gradients on a CPU)."""
    config = layer(SPARSE).config
    block, top_k, width = config.sparse_block_size, config.sparse_top_k, config.head_dim
    flex = torch.compile(flex_attention)
    print("| tokens | flex_attention, s | ours, s | largest difference |\n|---|---|---|---|")
    for length in lengths:
        query, key, value = (torch.randn(1, heads, length, width) for heads in (WIDTH // width, 1, 1))
        own, blocks = torch.arange(length) // block, length // block
        scores = torch.rand(1, 1, length, blocks).masked_fill(torch.arange(blocks) > own[:, None], float("-inf"))
        scores.scatter_(-1, own[None, None, :, None], 1.0)
        best = scores.topk(min(top_k, blocks))
        is_read = torch.zeros(1, length, blocks, dtype=torch.bool)
        is_read.scatter_(-1, best.indices[0], best.values[0] > float("-inf"))

        def seen(b, h, q, k, is_read=is_read):
            return is_read[0, q, k // block] & (k <= q)

        mask = create_block_mask(seen, 1, len(query[0]), length, length, device="cpu", BLOCK_SIZE=block)
        chosen = best.indices.masked_fill(best.values == float("-inf"), -1)
        gates = torch.ones(1, 1, length, len(query[0]), 1)
        # a query's heads side by side
        rows = (query / width**0.5).transpose(1, 2).unsqueeze(1).contiguous()
        runs = {
            "flex": partial(flex, query, key, value, block_mask=mask, enable_gqa=True),
            "ours": partial(read_selected, rows, key, value, gates, chosen, 0, block),
        }
        reads = {"flex": runs["flex"](), "ours": runs["ours"]()[0]}
        seconds = defaultdict(list)
        for _ in range(rounds):
            for name, run in runs.items():
                start = time.process_time()
                run()
                seconds[name].append(time.process_time() - start)
        apart = (reads["flex"] - reads["ours"][:, 0].transpose(1, 2)).abs().max()
        print(f"| {length:,} | {min(seconds['flex']):.3g} | {min(seconds['ours']):.3g} | {apart:.1g} |", flush=True)


def peak_bytes(kind: str, length: int) -> int:
    """Of a step, measured in a process of its own."""
    command = [sys.executable, __file__, "--output_dir", ".", "--peak_of", kind, "--lengths", str(length)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def print_peak(kind: str, length: int) -> None:
    model = layer(kind)
    for size in (64, length):
        hidden_states = torch.randn(1, size, WIDTH, requires_grad=True)
        grown = peak_growth(lambda x=hidden_states: step_seconds(model, x))
    print(grown)


def measure(options: argparse.Namespace, file: Path) -> None:
    """A row for every kind, length and measure: `{"kind", "tokens", "measure", "value"}`."""

    def add(kind: str, tokens: int, measure: str, value: float) -> None:
        row = {"kind": kind, "tokens": tokens, "measure": measure, "value": round(value, 5)}
        print(row, flush=True)
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(row) + "\n")

    if options.decode:
        model = HopeForCausalLM(HopeConfig.from_preset("tiny-hybrid")).eval()
        decoders = {n: Decoder(model, torch.randint(model.config.vocab_size, (1, n))) for n in options.contexts}
        times = {n: [decoder() for _ in range(options.tokens)] for n, decoder in decoders.items()}
        for n, seconds in times.items():
            add(SPARSE, n, "token", statistics.median(seconds))
        return
    models = {kind: layer(kind) for kind in (SDPA, SPARSE)}
    for length in options.lengths:
        hidden_states = torch.randn(1, length, WIDTH, requires_grad=True)
        seconds = defaultdict(list)
        for _ in range(options.rounds if length <= 8192 else 1):
            for kind, model in models.items():
                seconds[kind].append(step_seconds(model, hidden_states))
        for kind in models:
            add(kind, length, "step", min(seconds[kind]))
            add(kind, length, "peak", peak_bytes(kind, length))


def report(rows: list[dict], picture: Path) -> None:
    """Print the tables, and draw the steps."""
    found = {(row["measure"], row["tokens"], row["kind"]): row["value"] for row in rows}
    lengths = sorted({tokens for measure, tokens, _ in found if measure == "step"})
    print("| tokens | sdpa, s | sparse, s | over sdpa | sdpa, MiB | sparse, MiB | over sdpa |\n" + "|---" * 7 + "|")
    for n in lengths:
        (a, b), (p, q) = ([found[measure, n, kind] for kind in (SDPA, SPARSE)] for measure in ("step", "peak"))
        print(f"| {n:,} | {a:.3g} | {b:.3g} | {b / a:.2f} | {p / 2**20:.0f} | {q / 2**20:.0f} | {q / p:.2f} |")
    tokens = sorted(n for measure, n, _ in found if measure == "token")
    for n in tokens:
        print(f"token after {n:,}: {1e3 * found['token', n, SPARSE]:.2f} ms")
    if lengths:
        draw(found, lengths, picture)


def draw(found: dict, lengths: list[int], picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    axes = figure.subplots(1, 2)
    for axis, measure, title, scale in zip(
        axes, ("step", "peak"), ("forward and backward, microseconds a token", "peak, MiB"), (1e6, 2**-20), strict=True
    ):
        for kind, label in ((SDPA, "sdpa"), (SPARSE, "sparse")):
            values = [found[measure, n, kind] * scale / (n if measure == "step" else 1) for n in lengths]
            axis.plot(lengths, values, "o-", label=label)
        axis.set(title=title, xlabel="tokens", xscale="log", yscale="log")
        axis.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
        axis.grid(alpha=0.3)
        axis.legend()
    figure.savefig(picture, dpi=120)
    print(picture)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="folder of sparse.jsonl and sparse.png")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS), help="tokens of a text")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each mixer; the shortest time counts")
    parser.add_argument("--decode", action="store_true", help="measure a generated token instead")
    parser.add_argument("--contexts", type=int, nargs="*", default=list(CONTEXTS), help="tokens read before it")
    parser.add_argument("--tokens", type=int, default=64, help="generated tokens, of which the median counts")
    parser.add_argument("--flex", action="store_true", help="measure the selected blocks alone instead, and print")
    parser.add_argument("--report", action="store_true", help="only print and draw what was measured")
    parser.add_argument("--peak_of", choices=(SPARSE, SDPA), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.peak_of:
        return print_peak(options.peak_of, *options.lengths)
    if options.flex:
        return print_flex(options.lengths, options.rounds)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "sparse.jsonl"
    if not options.report:
        measure(options, file)
    elif not file.is_file():
        parser.error(f"--report: {file} is missing: run this without --report first")
    report([json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()], folder / "sparse.png")


if __name__ == "__main__":
    main()
