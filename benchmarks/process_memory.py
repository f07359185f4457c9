"""What a CPU process takes for training steps beside the plan: `python benchmarks/process_memory.py`.

Under `python -m torch.distributed.run --nproc_per_node 2` the model is sharded by FSDP version 2. A small step comes
first, so that what libraries take once is not counted. HOPE_KERNELS, glibc's MALLOC_MMAP_THRESHOLD_ and torch's
THP_MEM_ALLOC_ENABLE change the result. Linux only.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hope_hf import HopeConfig
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions
from hope_hf.plan.memory import memory
from hope_hf.plan.shapes import shapes_of
from hope_hf.plan.simulate import Step, make_mesh

MIB = 2**20
SMALL = HopeConfig.from_preset("tiny", hidden_size=128, num_hidden_layers=1, level_intermediate_sizes=[128])


def status(name: str) -> float:
    """A size of this process in MiB: `VmRSS` (now) or `VmHWM` (the largest so far)."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    raise ValueError(f"/proc/self/status has no {name}: run this on Linux.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    launch = Launch(STRATEGIES["full_shard" if world > 1 else "ddp"], world, world, on_cpu=True)

    def prepared(config: HopeConfig, options: StepOptions) -> Step:
        step = Step(config, launch, options, make_mesh(launch))
        step.connect()
        return step

    prepared(SMALL, StepOptions(1, 64)).run()
    before = status("VmRSS")
    # The largest size is counted from now on.
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    config = HopeConfig.from_preset(
        "tiny", hidden_size=args.hidden_size, num_hidden_layers=args.layers, level_intermediate_sizes=[1536]
    )
    options = StepOptions(args.rows, 512)
    step = prepared(config, options)
    for _ in range(args.steps):
        start = time.process_time()
        step.run()
        seconds = time.process_time() - start
    grown = status("VmHWM") - before
    shapes = shapes_of(config)
    planned = memory(config, shapes, launch, options).peak / MIB
    if os.environ.get("RANK", "0") == "0":
        print(f"{shapes.count / 1e6:.1f} M parameters, {world} process(es): planned {planned:.0f} MiB, ", end="")
        print(f"grown by {grown:.0f} ({grown / planned:.3f}), {seconds:.2f} CPU seconds a step", flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
