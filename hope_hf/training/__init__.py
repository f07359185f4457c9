"""The trainer: `main(argv)` is `hope-hf train` and run_clm.py.

`look_at_checkpoints` and `plot` are the programs that look at runs."""

from .checkpoints.tool import main as look_at_checkpoints
from .run import main
from .watch.plot import main as plot

__all__ = ["look_at_checkpoints", "main", "plot"]
