"""Does the memory carry anything? HOPE, the same HOPE with frozen memories, and Llama, on the built-in corpus.

Every arm is trained by run_clm.py at two learning rates and two seeds and counts at its better rate. The control that
matters is the frozen one: convolutions, gates and norms alone already beat a young Llama.

    python benchmarks/learning.py [--output_dir runs/learning]

Finished runs are kept and not repeated. Prints a table in Markdown.
"""

import argparse
import json
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = {"vocab_size": 1024, "hidden_size": 128, "num_hidden_layers": 2, "tie_word_embeddings": True}
HOPE = SHARED | {
    "memory_chunk_size": 64,
    "projection_chunk_size": 64,
    "level_intermediate_sizes": [112, 112, 112],
    "level_periods": [4096, 16384, 65536],
}
ARMS = {
    "hope": ("hope", HOPE),
    "hope, memories frozen": ("hope", HOPE | {"memory_learning_rate_max": 0.0}),
    "llama": ("llama", SHARED | {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 552}),
}


def train(output_dir: Path, arm: str, learning_rate: float, seed: int, steps: int) -> dict:
    """Train one arm, or read what an earlier call left; its final validation loss."""
    model_type, overrides = ARMS[arm]
    folder = output_dir / f"{arm.replace(', ', '-').replace(' ', '-')}-lr{learning_rate:g}-seed{seed}"
    command = [
        sys.executable, ROOT / "run_clm.py", "--output_dir", folder,
        "--model_type", model_type, "--config_overrides", json.dumps(overrides),
        "--block_size", 512, "--per_device_train_batch_size", 8, "--max_train_steps", steps,
        "--learning_rate", learning_rate, "--num_warmup_steps", 20, "--seed", seed,
        "--eval_steps", 0, "--checkpointing_steps", 100, "--max_eval_samples", 30, "--cpu_threads", 1,
    ]  # fmt: skip
    finished = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if finished.returncode:
        raise RuntimeError(f"{folder} failed:\n{finished.stdout}\n{finished.stderr}")
    loss = json.loads((folder / "all_results.json").read_text())["eval_loss"]
    print(f"{folder.name}: {loss:.4f}", flush=True)
    return {"arm": arm, "learning_rate": learning_rate, "seed": seed, "loss": loss}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/learning"))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--learning_rates", type=float, nargs="+", default=[2e-3, 4e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--max_train_steps", type=int, default=800, help="of 4,096 tokens")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, one thread each")
    options = parser.parse_args()
    jobs = [
        (options.output_dir, arm, rate, seed, options.max_train_steps)
        for seed in options.seeds
        for rate in options.learning_rates
        for arm in options.arms
    ]
    with ThreadPoolExecutor(options.parallel) as pool:
        results = list(pool.map(lambda job: train(*job), jobs))
    print("\n| model | learning rate | validation loss, nats per token (mean of seeds) | seeds |\n|---|---|---|---|")
    for arm in options.arms:
        best = []
        for rate in options.learning_rates:
            losses = [r["loss"] for r in results if r["arm"] == arm and r["learning_rate"] == rate]
            best.append((statistics.mean(losses), rate, losses))
        loss, rate, losses = min(best)
        print(f"| {arm} | {rate:g} | {loss:.4f} | {', '.join(f'{value:.4f}' for value in losses)} |")


if __name__ == "__main__":
    main()
