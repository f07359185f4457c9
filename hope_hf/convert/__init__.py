"""A pretrained Llama, Mistral, Qwen2 or Qwen3 as a HOPE with the same logits: `hope-hf convert`."""

from hope_hf.lazy import late_names

# By module, what the other rooms take from there.
NAMES = {
    "check": ("CheckFailed",),
    "folder": ("convert_folder",),
    "run": ("main",),
}
__getattr__, __dir__ = late_names(__name__, NAMES)
