"""The trainer: `main(argv)` is what `run_clm.py` calls."""

from .run import main

__all__ = ["main"]
