"""A trained HOPE, read with other chunk sizes than it was trained with.

python benchmarks/chunk_sizes.py --model_name_or_path DIR --validation_file FILE [--chunks 16 32 64 128 256]

prints the mean loss of the text's tokens in blocks of `--block_size`, each read from the initial state. The chunk,
after which keys and values are made with new weights, is part of the model: this measures the cost of another one than
in training.
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hope_hf  # noqa: F401  registers the model


@torch.no_grad()
def loss(model, blocks: torch.Tensor) -> float:
    """Nats per token over blocks [N, T]."""
    return sum(model(rows, labels=rows).loss.item() * len(rows) for rows in blocks.split(8)) / len(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name_or_path", required=True)
    parser.add_argument("--validation_file", type=Path, required=True)
    parser.add_argument("--chunks", nargs="+", type=int, default=[16, 32, 64, 128, 256])
    parser.add_argument("--block_size", type=int, default=512)
    parser.add_argument("--limit", type=int, default=64, help="blocks")
    options = parser.parse_args()
    torch.set_flush_denormal(True)
    tokenizer = AutoTokenizer.from_pretrained(options.model_name_or_path)
    ids = tokenizer(options.validation_file.read_text(encoding="utf-8"), verbose=False)["input_ids"]
    number = min(options.limit, len(ids) // options.block_size)
    blocks = torch.tensor(ids[: number * options.block_size]).view(number, options.block_size)
    load = AutoModelForCausalLM.from_pretrained
    trained = load(options.model_name_or_path).eval()
    base = loss(trained, blocks)
    size = trained.config.memory_chunk_size
    print(f"{number} blocks of {options.block_size} tokens; trained with chunks of {size}: {base:.4f}\n")
    print("| chunk | loss, minus that with the trained one |\n|---|---|")
    for chunk in options.chunks:
        other = loss(load(options.model_name_or_path, memory_chunk_size=chunk).eval(), blocks)
        print(f"| {chunk} | {other - base:+.4f} |", flush=True)


if __name__ == "__main__":
    main()
