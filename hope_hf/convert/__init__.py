"""A pretrained Llama, Mistral, Qwen2 or Qwen3 as a HOPE with the same logits: `hope-hf convert`."""

from .check import CheckFailed
from .folder import convert_folder
from .run import main

__all__ = ["CheckFailed", "convert_folder", "main"]
