"""Several processes of one evaluation: `accelerate launch` or torchrun starts them, and they share the work."""

import atexit
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist


def are_several() -> bool:
    """Whether a launcher has started more than this process."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join_processes():
    """Connect to the other processes; each has its own accelerator where there are several."""
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())
    # Only answers are sent, so gloo works for every device. The time of the slowest process is unknown.
    dist.init_process_group("gloo", timeout=timedelta(weeks=52))
    atexit.register(dist.destroy_process_group)


def answer_together(answer: Callable[[list], list], requests: list) -> list:
    """`answer(requests)`; every process computes a part, and all get all answers, in order.

    lm-eval's requests with the same first argument (the context) go to one process, which reads it once.
    """
    contexts = dict.fromkeys(request.args[0] for request in requests)
    owners = {context: index % dist.get_world_size() for index, context in enumerate(contexts)}
    mine = [request for request in requests if owners[request.args[0]] == dist.get_rank()]
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, answer(mine) if mine else [])
    queues = [iter(part) for part in parts]
    return [next(queues[owners[request.args[0]]]) for request in requests]
