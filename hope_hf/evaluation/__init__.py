"""The evaluation: `main(argv)` is what `run_eval.py` calls."""

from .run import main

__all__ = ["main"]
