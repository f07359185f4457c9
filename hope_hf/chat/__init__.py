"""A conversation with a model that goes on learning from what it reads: `hope-hf chat MODEL`."""

from .run import generate, main

__all__ = ["generate", "main"]
