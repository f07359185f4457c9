"""The trainer: `main(argv)` is what `run_clm.py` calls. The planner takes its loss and its checks of launch files."""

from .engines.launch_file import check as check_launch_file
from .objective import summed_loss
from .run import main

__all__ = ["check_launch_file", "main", "summed_loss"]
