"""The trainer: `main(argv)` is what `run_clm.py` calls. The planner takes its loss, recipes and launch files."""

from .engines.launch_file import read as read_launch_file
from .objective import can_skip_logits, summed_loss
from .parsing import split_run_recipe
from .recompute import recompute_activations
from .run import main

__all__ = ["can_skip_logits", "main", "read_launch_file", "recompute_activations", "split_run_recipe", "summed_loss"]
