"""How long training waits for a background checkpoint, relative to the time to write it.

Trains a preset under a launch file with `--async_save` and prints each checkpoint's stall and write time, and the
median of their ratio.

    python benchmarks/save_stall.py --config single.yaml --num_processes 1
    python benchmarks/save_stall.py --config fsdp2.yaml --num_processes 2
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def rows(config: str, num_processes: int, preset: str, checkpoints: int, steps: int) -> list[dict]:
    """The metrics of a run that writes `checkpoints` in the background, one every `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", str(ROOT / "accelerate_configs" / config), "--num_processes", str(num_processes)]
        command += [str(ROOT / "run_clm.py"), "--config_name", preset, "--dataset_name", "synthetic"]
        command += ["--max_train_samples", "2000", "--max_eval_samples", "2", "--block_size", "32"]
        command += ["--per_device_train_batch_size", "1", "--max_train_steps", str((checkpoints + 1) * steps)]
        command += ["--checkpointing_steps", str(steps), "--async_save", "true", "--save_total_limit", "1"]
        command += ["--logging_steps", "1", "--eval_steps", "0", "--output_dir", f"{folder}/run"]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, stdout=subprocess.DEVNULL)
        lines = Path(folder, "run", "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="single.yaml", help="file of accelerate_configs/")
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--preset", default="pilot")
    parser.add_argument("--checkpoints", type=int, default=5)
    parser.add_argument(
        "--steps", type=int, default=8, help="between two checkpoints; the first must be whole by then"
    )
    options = parser.parse_args()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    found = rows(options.config, options.num_processes, options.preset, options.checkpoints, options.steps)
    times = [
        (row["train/checkpoint_stall_seconds"], row["train/checkpoint_write_seconds"])
        for row in found
        if "train/checkpoint_stall_seconds" in row
    ]
    print(f"{options.preset}, {options.config}, {options.num_processes} process(es)")
    print("| stall, s | write, s | stall / write |\n|---|---|---|")
    for stall, write in times:
        print(f"| {stall:.2f} | {write:.2f} | {stall / write:.2f} |")
    print(f"median of {len(times)}: {statistics.median(stall / write for stall, write in times):.3f}")


if __name__ == "__main__":
    main()
