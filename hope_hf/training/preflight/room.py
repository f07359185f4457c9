"""Before the first step of every run: does it fit into memory and onto the disk? By arithmetic, in a second."""

from dataclasses import asdict

from accelerate.utils import gather_object

from hope_hf.common.process import is_first_process, warn_once

from .checks import CHECKS, Result, worst
from .facts import Room

# A GPU refuses what does not fit by itself, and nothing else suffers from it.
ASKED = ("disk", "host")
ON_CPU = (*ASKED, "memory")


def require_room(room: Room) -> None:
    """ValueError on all processes if the run does not fit; it says what is planned and free, and which flags help.

    Warns where the memory is almost all. What is only estimated is not refused: a run of an architecture whose
    activations no formula describes.
    """
    for name in ASKED if room.on_gpu else ON_CPU:
        own = CHECKS[name](room)
        found = worst([Result(**result) for result in gather_object([asdict(own)])])
        certain = name == "disk" or not room.sizes.is_estimate
        if found.level == "fail" and certain:
            raise ValueError(f"The run in {room.args.output_dir} does not fit this machine: {found.text}.")
        if name == "memory" and found.level != "ok" and room.free.host is not None and is_first_process():
            warn_once(f"The memory may not hold the run: {found.text}.")
