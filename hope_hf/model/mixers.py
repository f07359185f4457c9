"""The kinds of layers, with the class of each one's mixer; and softmax attention, which is transformers' own.

A new mixer is a file with a class that derives from `layers.Mixer`, and a line at the end of this file. Configuration,
cache, checks, planner and model card read everything else from the class.
"""

from functools import partial

import torch
from transformers import configuration_utils
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING, Cache
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaAttention

from .cache_hope import HopeMemoryLayer, KeyValues
from .layers import Mixer
from .memory_mixer import SelfModifyingTitans
from .sparse_attention import HopeSparseAttention


class _Extension:
    """A cache for transformers' attention that concatenates a call's keys and values to a state, in new tensors.

    The given state does not change, so that a block recomputed in the backward pass reads the same state.
    """

    def __init__(self, state: KeyValues | None):
        self.state = state

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args) -> KeyValues:
        if self.state is not None:
            keys, values = (torch.cat(pair, dim=-2) for pair in zip(self.state, (keys, values), strict=True))
        self.state = KeyValues(keys, values)
        return self.state


class HopeAttention(Mixer, LlamaAttention):
    """Causal multi-head attention with rotary positions."""

    needs = frozenset({"mask", "rotary"})
    heads = ("num_attention_heads", "num_key_value_heads")
    input_readers = 3
    name = "softmax attention"

    def forward(
        self,
        hidden_states: torch.Tensor,
        state: KeyValues | None = None,
        *,
        plan=None,
        need_state: bool = False,
        cache: Cache | None = None,
        **context,
    ) -> tuple[torch.Tensor, KeyValues | None, torch.Tensor | None]:
        """[B, T, hidden_size]; the state after the call; weights [B, H, T, T] of eager attention.

        Args:
            hidden_states: [B, T, hidden_size].
            state: keys and values of the text so far, unless a cache is given.
            need_state: whether to return the state after the last token.
            cache: cache to write into; no state is then read or returned. Not called `past_key_values`, since
                transformers removes that argument from recomputed blocks.
            context: arguments of `LlamaAttention`: mask, rotary positions, and options of the kernels.
        """
        extension = _Extension(state) if need_state and cache is None else None
        written = cache if extension is None else extension
        output, weights = super().forward(hidden_states, past_key_values=written, **context)
        return output, None if extension is None else extension.state, weights

    @staticmethod
    def tensor_parallel_maps(config: PreTrainedConfig) -> dict[str, str]:
        """Each rank computes the heads of its part of the maps; `o_proj` sums over the ranks."""
        return {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}

    @staticmethod
    def mixing_flops(config: PreTrainedConfig, sequence_length: int) -> int:
        """2 T per channel: scores and reads of T / 2 keys on average."""
        return 2 * sequence_length * config.num_attention_heads * config.head_dim

    @staticmethod
    def cache_bytes(config: PreTrainedConfig, tokens: int) -> int:
        """Keys and values of all tokens."""
        return 4 * 2 * tokens * config.num_key_value_heads * config.head_dim

    @staticmethod
    def kept_bytes(config: PreTrainedConfig, batch_size: int, length: int, low: int) -> int:
        """Queries, keys, values and reads, and the sum of every query's softmax in fp32."""
        heads, groups = config.num_attention_heads, config.num_key_value_heads
        return batch_size * length * (low * (2 * heads + 2 * groups) * config.head_dim + 4 * heads)


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
