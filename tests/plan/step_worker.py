"""Takes the planner's step with real tensors and prints the peak of live tensor bytes, as torch's allocator counts it.

    torchrun --nproc_per_node 2 tests/plan/step_worker.py '[{"config": {...}, "strategy": "full_shard", ...}]'
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig

import hope_hf  # noqa: F401
from hope_hf.optim import own_part
from hope_hf.plan.launch import STRATEGIES, Launch, StepOptions
from hope_hf.plan.simulate import Step, make_mesh


def resting_bytes(step: Step) -> int:
    """Bytes of this process's weights and optimizer; DDP's buckets are as large as the weights."""
    weights = sum(own_part(parameter).nbytes for parameter in step.model.parameters())
    buckets = weights if step.launch.world_size > 1 and step.launch.strategy.engine == "plain" else 0
    total = weights + buckets
    for state in step.optimizer.state.values():
        total += sum(own_part(tensor).nbytes for tensor in state.values())
    for tensor in (*step.batches, *step.model.buffers()):
        total += tensor.nbytes
    return total


def allocated_peak(step: Step) -> int:
    """The most that the step's tensors hold at once, in bytes: the allocator reports every allocation.

    Without gloo's copies of what it sends and receives, which other backends do not make.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step.run()
    allocations = []
    events = [(event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while events:
        event, is_of_gloo = events.pop()
        is_of_gloo = is_of_gloo or event.name.startswith(("c10d::", "gloo:"))
        events.extend((child, is_of_gloo) for child in event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields, is_of_gloo))
    allocations.sort(key=lambda allocation: allocation[0])
    size = peak = 0
    copies = set()
    for _, fields, is_of_gloo in allocations:
        if fields.alloc_size > 0 and is_of_gloo:
            copies.add(fields.ptr)
        elif fields.alloc_size < 0 and fields.ptr in copies:
            copies.remove(fields.ptr)
        else:
            size += fields.alloc_size
            peak = max(peak, size)
    return peak


def measure(task: dict, world: int) -> int:
    """The third and fourth step of a task: before them, torch fills its caches, and DDP makes its final buckets."""
    strategy = STRATEGIES[task["strategy"]]
    launch = Launch(strategy, world, world if strategy.shared else 1, task["precision"], on_cpu=True)
    torch.manual_seed(0)
    config = AutoConfig.for_model(**task["config"])
    step = Step(config, launch, StepOptions(**task["options"]), make_mesh(launch))
    step.connect()
    step.run()
    step.run()
    # While another process is late, what is being reduced lives on beside what comes next: the least of two steps.
    return resting_bytes(step) + min(allocated_peak(step), allocated_peak(step))


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    peaks = [measure(task, world) for task in json.loads(sys.argv[1])]
    if os.environ.get("RANK", "0") == "0":
        print("RESULT " + json.dumps(peaks), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
