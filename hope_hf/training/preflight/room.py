"""Before the first step of every run: does it fit into memory and onto the disk? In a second or two."""

from accelerate.utils import gather_object

from hope_hf.common.process import is_first_process, warn_once

from .checks import CHECKS, worst
from .facts import Room

# A GPU refuses what does not fit by itself, and nothing else suffers from it.
ON_GPU = ("disk", "host")
ON_CPU = (*ON_GPU, "memory")


def require_room(room: Room) -> None:
    """ValueError on all processes if the run does not fit; it says what is planned and free, and which flags help.

    Warns where the memory is almost all. What is only estimated is not refused: a run of an architecture that
    does not run on fake tensors.
    """
    for name in ON_GPU if room.on_gpu else ON_CPU:
        result = worst(gather_object([CHECKS[name](room)]))
        certain = name == "disk" or not room.sizes.is_estimate
        if result.level == "fail" and certain:
            raise ValueError(f"The run in {room.options.output_dir} does not fit this machine: {result.text}.")
        if name == "memory" and result.level != "ok" and room.free.host is not None and is_first_process():
            warn_once(f"The memory may not hold the run: {result.text}.")
