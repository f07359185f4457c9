"""Takes the planner's step with real tensors and prints the peak of live tensor bytes, as torch's allocator counts it.

    torchrun --nproc_per_node 2 tests/plan/step_worker.py '[{"config": {...}, "strategy": "full_shard", ...}]'
"""

import ctypes
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

import hope_hf  # noqa: F401
from hope_hf.optim import own_part
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions
from hope_hf.plan.simulate import Step, make_mesh


def held(step: Step) -> int:
    """Bytes of this process's weights and optimizer; DDP's buckets are as large as the weights."""
    weights = sum(own_part(p).nbytes for p in step.model.parameters())
    states = sum(own_part(t).nbytes for state in step.optimizer.state.values() for t in state.values())
    buckets = weights if step.launch.world_size > 1 and step.launch.strategy.engine == "plain" else 0
    batches = sum(batch.nbytes for batch in step.batches)
    return weights + states + buckets + batches + sum(b.nbytes for b in step.model.buffers())


def allocated_peak(step: Step) -> int:
    """The most that the step's tensors hold at once, in bytes: the allocator reports every allocation.

    Without gloo's copies of what it sends and receives, which other backends do not make.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.run()
    found = []
    stack = [(event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while stack:
        event, by_gloo = stack.pop()
        by_gloo = by_gloo or event.name.startswith(("c10d::", "gloo:"))
        stack.extend((child, by_gloo) for child in event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, by_gloo))
    now = peak = 0
    of_gloo = set()
    for _, size, address, by_gloo in sorted(found, key=lambda one: one[0]):
        if size > 0 and by_gloo:
            of_gloo.add(address)
        elif size < 0 and address in of_gloo:
            of_gloo.remove(address)
        else:
            now += size
            peak = max(peak, now)
    return peak


def resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resident_growth(step: Step) -> int:
    """The most by which resident memory grows in the step."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    start = peak = resident()
    running = True

    def watch():
        nonlocal peak
        while running:
            peak = max(peak, resident())
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    step.run()
    running = False
    thread.join()
    return peak - start


def measure(task: dict, world: int) -> dict[str, int]:
    """The third and fourth step of a task: before them, torch fills its caches, and DDP makes its final buckets."""
    strategy = STRATEGIES[task["strategy"]]
    launch = Launch(strategy, world, world if strategy.shared else 1, task["precision"])
    torch.manual_seed(0)
    config = AutoConfig.for_model(**task["config"])
    step = Step(config, launch, StepOptions(**task["options"]), make_mesh(launch))
    step.connect()
    step.run()
    step.run()
    base = held(step)
    # While another process is late, what is being reduced lives on beside what comes next: the least of two steps.
    peak = base + min(allocated_peak(step) for _ in range(2))
    return {"peak": peak, "resident": base + resident_growth(step) if task["name"] == "pilot" else 0}


def main():
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    world = dist.get_world_size() if dist.is_initialized() else 1
    results = [measure(task, world) for task in json.loads(sys.argv[1])]
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("RESULT " + json.dumps(results), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
