"""Speed and memory of HOPE and its peers on one GPU in bfloat16: one table, printed and written to a file.

    python benchmarks/gpu_speed.py --output_dir runs/gpu                       pilot and mid at 2K, 8K and 32K tokens
    python benchmarks/gpu_speed.py --output_dir runs/gpu --device cpu --presets tiny --lengths 256 --tokens 512

Every model has the preset's width, depth, vocabulary and parameters (`benchmarks/quality_models.py`) and the kernels
that are installed: Llama flash attention or torch's own, Mamba-2 and the gated DeltaNet those of mamba-ssm and
flash-linear-attention; `hope_triton` and `hope_torch` are HOPE under that HOPE_KERNELS. Models take turns, each alone
in memory, at equal tokens a step. What does not run has its reason in its row.
"""

import argparse
import gc
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.quality_models import HOPE, LLAMA, SIZES, Size, build, count_parameters
from benchmarks.step import Decoder
from hope_hf import PRESETS, HopeConfig
from hope_hf.step.objective import can_skip_logits, summed_loss
from hope_hf.training.watch.telemetry import flops_per_token, peak_flops

# what HOPE_KERNELS is for a model; "auto" for all others
KERNELS = {"hope_triton": "triton", "hope_torch": "torch"}
MODELS = (HOPE, *KERNELS, LLAMA, "mamba2", "gated_deltanet")
CONTEXTS = (2048, 8192)
NEW_TOKENS = 32
COLUMNS = (
    "preset", "tokens", "model", "tokens/s", "over llama", "MFU %", "peak GiB", "prefill ms", "token ms", "note"
)  # fmt: skip


def size_of(preset: str) -> Size:
    """HOPE's preset, to whose parameters the peers are fitted."""
    config = HopeConfig.from_preset(preset)
    shared = {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "num_hidden_layers")}
    return replace(
        SIZES["medium"],
        **shared,
        memory_heads=config.num_memory_heads,
        level_intermediate_size=config.level_intermediate_sizes[0],
        parameters=count_parameters("hope", shared | {
            "level_intermediate_sizes": config.level_intermediate_sizes,
            "level_periods": config.level_periods,
            "tie_word_embeddings": True,
        }),
        mamba_layers=2 * config.num_hidden_layers,
    )  # fmt: skip


def new_network(name: str, size: Size, device: torch.device) -> torch.nn.Module:
    """A model with random weights in bfloat16 on the device, with the fastest attention that is installed."""
    os.environ["HOPE_KERNELS"] = KERNELS.get(name, "auto")
    with device:
        network = build(HOPE if name in KERNELS else name, size).new(torch.bfloat16)
    if name == LLAMA and device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None:
        network.set_attn_implementation("flash_attention_2")
    return network


def seconds_of(function: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Median wall-clock seconds of a call, after one to warm up."""
    seconds = []
    for _ in range(rounds + 1):
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def row_of(name: str, size: Size, length: int, options: argparse.Namespace) -> dict:
    """What one model does with texts of one length."""
    device = torch.device(options.device)
    network = new_network(name, size, device)
    input_ids = torch.randint(size.vocab_size, (max(1, options.tokens // length), length), device=device)

    def step() -> None:
        inputs = {"input_ids": input_ids, "use_cache": False}
        (summed_loss(network, inputs, input_ids, can_skip_logits(network)) / input_ids.numel()).backward()
        network.zero_grad()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = seconds_of(step, device, options.rounds)
    speed = input_ids.numel() / seconds
    row = {"tokens/s": speed}
    if device.type == "cuda":
        row["peak GiB"] = torch.cuda.max_memory_allocated(device) / 2**30
    if peak := peak_flops(device, "bf16"):
        row["MFU %"] = 100 * speed * flops_per_token(network, length) / peak
    if length in options.contexts:
        network.eval()
        decoder = Decoder(network, input_ids[:1])
        row["prefill ms"] = 1e3 * seconds_of(lambda: Decoder(network, input_ids[:1]), device, options.rounds)
        row["token ms"] = 1e3 * seconds_of(decoder, device, NEW_TOKENS)
    counted = [getattr(module, "kernel_fallbacks", {}) for module in network.modules()]
    row["note"] = "; ".join(sorted({reason for fallbacks in counted for _, reason in fallbacks}))
    return row


def measure(options: argparse.Namespace) -> list[dict]:
    rows = []
    for preset in options.presets:
        size = size_of(preset)
        for length in options.lengths:
            found = {}
            for name in options.models:
                # torch's operators alone take seconds a step; one length shows it
                if KERNELS.get(name) == "torch" and length != min(options.lengths):
                    continue
                try:
                    row = row_of(name, size, length, options)
                except (RuntimeError, ValueError, ImportError) as error:
                    row = {"note": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
                gc.collect()
                if options.device == "cuda":
                    torch.cuda.empty_cache()
                found[name] = {"preset": preset, "tokens": length, "model": name, **row}
            for row in found.values():
                if "tokens/s" in row and "tokens/s" in found.get(LLAMA, {}):
                    row["over llama"] = row["tokens/s"] / found[LLAMA]["tokens/s"]
                print_row(row)
                rows.append(row)
    return rows


def print_row(row: dict) -> None:
    cells = [row.get(column, "") for column in COLUMNS]
    cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
    print(f"| {' | '.join(cells)} |", flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True, help="folder of gpu.json")
    parser.add_argument("--presets", nargs="+", default=["pilot", "mid"], choices=list(PRESETS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens of a text")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, help="lengths after which to generate")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=3, help="steps after one to warm up")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; --device cpu measures this processor")
    torch.manual_seed(0)
    folder = Path(options.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    (folder / "gpu.json").write_text(json.dumps(measure(options), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
