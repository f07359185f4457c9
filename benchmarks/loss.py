"""Memory and CPU time of the next-token loss with its gradients: without whole logits, and with them.

    python benchmarks/loss.py [--tokens 4096] [--vocab_size 32000] [--width 256] [--rounds 3]

MiB that the process grows by beside hidden states and weight, gradients included, and CPU seconds on one thread;
medians of both in turn.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.peers_speed import peak_growth
from hope_hf.model.loss import linear_cross_entropy


def whole_logits(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight), labels, reduction="sum")


LOSSES = {"without whole logits": linear_cross_entropy, "with whole logits": whole_logits}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab_size", type=int, default=32_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3, help="rounds after one to warm up")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, requires_grad=True)
    weight = (0.02 * torch.randn(options.vocab_size, options.width)).requires_grad_()
    labels = torch.randint(options.vocab_size, (options.tokens,))
    found = {name: ([], []) for name in LOSSES}
    for _ in range(options.rounds + 1):
        for name, loss in LOSSES.items():
            hidden.grad = weight.grad = None
            start = time.process_time()
            found[name][0].append(peak_growth(lambda loss=loss: loss(hidden, weight, labels).backward()) / 2**20)
            found[name][1].append(time.process_time() - start)
    print("| loss | MiB | CPU seconds |\n|---|---|---|")
    for name, (sizes, seconds) in found.items():
        print(f"| {name} | {statistics.median(sizes[1:]):,.0f} | {statistics.median(seconds[1:]):.2f} |")


if __name__ == "__main__":
    main()
