"""A model with windows learns which older tokens to retain: `hope-hf retain`."""

from hope_hf.lazy import late_names

# By module, what the other rooms take from there.
NAMES = {
    "run": ("main",),
}
__getattr__, __dir__ = late_names(__name__, NAMES)
