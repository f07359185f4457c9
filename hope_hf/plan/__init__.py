"""Memory, time and cost of a run before a GPU is rented: `python -m hope_hf.plan`."""

from .run import main

__all__ = ["main"]
