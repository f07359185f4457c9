"""The kinds of layers: each name in `HopeConfig.layer_types` with its mixer's class.

A new mixer is a file with a class that derives from `layers.Mixer`, and a line at the end of this file. Configuration,
cache, checks, planner and model card ask the class for all else.
"""

from functools import partial

from transformers import configuration_utils
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING

from .attention import HopeAttention
from .cache_hope import HopeMemoryLayer
from .layers import Mixer
from .memory_mixer import SelfModifyingTitans
from .sparse_attention import HopeSparseAttention

MIXERS: dict[str, type[Mixer]] = {}


def register(kind: str, mixer: type[Mixer]) -> None:
    """Let layers of this kind have this mixer; transformers learns the kind's name and its layers of caches."""
    MIXERS[kind] = mixer
    # `Trainer` reads a checkpoint's configuration as one of no particular model, which knows transformers' kinds only.
    if kind not in configuration_utils.ALLOWED_ATTN_LAYER_TYPES:
        configuration_utils.ALLOWED_ATTN_LAYER_TYPES += (kind,)
    # Every copy of this file (each model loaded with `trust_remote_code` brings one) comes here, and the first serves
    # the models of all.
    if mixer.state_class is not None:
        DYNAMIC_LAYER_TYPE_MAPPING.setdefault(kind, partial(HopeMemoryLayer, mixer.state_class))
        STATIC_LAYER_TYPE_MAPPING.setdefault(kind, partial(mixer.static_layer, mixer.state_class))


register("hope_memory", SelfModifyingTitans)
register("sparse_attention", HopeSparseAttention)
register("full_attention", HopeAttention)
