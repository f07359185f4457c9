"""The kinds of layers, with the class of each one's mixer.

A new mixer is a file with a class that derives from `layers.Mixer`, and a line at the end of this file. Configuration,
cache, checks, planner and model card read everything else from the class.
"""

from functools import partial

from transformers import configuration_utils
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from .attention import HopeAttention
from .cache_parts import HopeMemoryLayer
from .layers import Mixer
from .memory_mixer import SelfModifyingTitans
from .retaining_attention import HopeRetainingAttention
from .sparse_attention import HopeSparseAttention
from .window_attention import HopeWindowAttention

MIXERS: dict[str, type[Mixer]] = {}


def register(kind: str, mixer: type[Mixer]) -> None:
    """Give layers of this kind this mixer, and register the kind and its cache layers with transformers."""
    MIXERS[kind] = mixer
    # `Trainer` reads a checkpoint's configuration without its class, and then accepts only transformers' kinds.
    if kind not in configuration_utils.ALLOWED_ATTN_LAYER_TYPES:
        configuration_utils.ALLOWED_ATTN_LAYER_TYPES += (kind,)
    # Each model loaded with `trust_remote_code` has its own copy of this file; the first one's cache layers serve all.
    if mixer.state_class is not None:
        DYNAMIC_LAYER_TYPE_MAPPING.setdefault(kind, partial(HopeMemoryLayer, mixer.state_class))
        STATIC_LAYER_TYPE_MAPPING.setdefault(kind, partial(mixer.static_layer, mixer.state_class))


register("hope_memory", SelfModifyingTitans)
register("sparse_attention", HopeSparseAttention)
register("full_attention", HopeAttention)
register("window_attention", HopeWindowAttention)
register("retaining_attention", HopeRetainingAttention)
