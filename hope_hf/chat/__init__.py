"""A conversation with a model that goes on learning from what it reads: `hope-hf chat MODEL`."""

from .program import generate, main

__all__ = ["generate", "main"]
