"""Memory and time of a training step by what is recomputed (`--gradient_checkpointing`), on one CPU thread.

    python benchmarks/recompute.py [--preset tiny] [--tokens 1024] [--rounds 5]

Memory is the peak of the planner's simulation of the step; CPU time that of forward and backward, of settings in
turn, medians over rounds.
"""

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.step import in_turn, step_seconds
from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.plan.simulate import simulate
from hope_hf.plan.step import StepOptions
from hope_hf.plan.strategy import STRATEGIES, Launch
from hope_hf.step.recompute import parse_recomputed, recompute_activations

SETTINGS = ("none", "every:4", "every:2", "mixer", "block")


def table(preset: str, rows: int, tokens: int, rounds: int) -> str:
    """Of each setting: GB at the peak, CPU seconds, and median and range of their ratio to `none` in a round."""
    config = HopeConfig.from_preset(preset)
    input_ids = torch.randint(config.vocab_size, (rows, tokens))
    measures = {}
    for setting in SETTINGS:
        model = HopeForCausalLM(config).train()
        recompute_activations(model, parse_recomputed(setting))
        measures[setting] = partial(step_seconds, model, input_ids)
    seconds = in_turn(measures, rounds)
    lines = ["| `--gradient_checkpointing` | peak, GB | CPU seconds | over none |", "|---|---|---|---|"]
    for setting, own in seconds.items():
        peak = simulate(
            config, Launch(STRATEGIES["ddp"], 1, 1), StepOptions(rows, tokens, checkpointing=setting)
        ).peak
        ratios = [value / none for value, none in zip(own, seconds["none"], strict=True)]
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {setting} | {peak / 1e9:.3f} | {statistics.median(own):.2f} | {ratio} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5, help="rounds after one to warm up")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    print(table(options.preset, options.rows, options.tokens, options.rounds))


if __name__ == "__main__":
    main()
