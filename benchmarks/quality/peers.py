"""Peers of HOPE that transformers does not have by name.

| model type | what it is |
|---|---|
| llama_conv | Llama with HOPE's short convolutions on queries, keys and values |
| gated_deltanet | Qwen3-Next with a gated DeltaNet and a dense MLP in every layer, as initialised by its authors |
| kimi_delta | Kimi Linear with Kimi Delta Attention and a dense MLP in every layer |

Importing this module registers them with the Auto classes, so that run_clm.py's trainer takes them by name
(`train.py`).
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3NextModel,
    initialization,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from hope_hf import CACHE_NAME
from hope_hf.model.layers import ShortConvolution

# Chunks of 16 give the same values and gradients as those of 64 (to 3e-6) in a quarter of the time.
modeling_kimi_linear.chunk_kimi_delta_attention = partial(
    modeling_kimi_linear.chunk_kimi_delta_attention, chunk_size=16
)


@strict
class LlamaConvConfig(LlamaConfig):
    """A `LlamaConfig` and the width of the convolutions; as many key and value heads as heads."""

    model_type = "llama_conv"

    conv_kernel_size: int = 4
    # The convolutions keep no cache: every new token reads the whole text again.
    use_cache: bool = False


class LlamaConvAttention(LlamaAttention):
    """`LlamaAttention` whose queries, keys and values pass a causal depthwise convolution before the rotation.

    The convolutions are HOPE's `ShortConvolution` (width 4, no bias, uniform between -1/2 and 1/2) without its SiLU.
    They do not read across a restart of the positions.
    """

    def __init__(self, config: LlamaConvConfig, layer_idx: int):
        super().__init__(config, layer_idx)
        self.q_conv1d = ShortConvolution(config, config.num_attention_heads)
        self.k_conv1d = ShortConvolution(config, config.num_attention_heads)
        self.v_conv1d = ShortConvolution(config, config.num_attention_heads)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, hidden_size] and the attention weights, as from `LlamaAttention`; ValueError for a cache."""
        if kwargs.pop(CACHE_NAME, None) is not None:
            raise ValueError("llama_conv keeps no cache: generate with use_cache=False.")
        batch, length, _ = hidden_states.shape

        def heads(projection: nn.Linear, convolution: ShortConvolution) -> torch.Tensor:
            x = projection(hidden_states).view(batch, length, -1, self.head_dim)
            return convolve(x, convolution(x.dtype), position_ids).transpose(1, 2)

        query = heads(self.q_proj, self.q_conv1d)
        key = heads(self.k_proj, self.k_conv1d)
        value = heads(self.v_proj, self.v_conv1d)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return self.o_proj(output.reshape(batch, length, -1)), weights


def convolve(x: torch.Tensor, weights: torch.Tensor, position_ids: torch.Tensor | None) -> torch.Tensor:
    """`sum_j weights[K - 1 - j] x_{t - j}` within each document.

    Args:
        x: [B, T, H, D].
        weights: [K, H, D], oldest token first.
        position_ids: [B or 1, T], number of tokens before each one in its document; without it a row is one document.
    """
    width, length = len(weights), x.shape[1]
    mixed = weights[-1] * x
    for back in range(1, min(width, length)):
        earlier = F.pad(x[:, : length - back], (0, 0, 0, 0, back, 0))
        if position_ids is not None:
            earlier = earlier * (position_ids >= back)[..., None, None]
        mixed = mixed + weights[width - 1 - back] * earlier
    return mixed


class LlamaConvModel(LlamaModel):
    """`LlamaModel` with `LlamaConvAttention` in every layer."""

    config: LlamaConvConfig

    def __init__(self, config: LlamaConvConfig):
        super().__init__(config)
        for index, layer in enumerate(self.layers):
            layer.self_attn = LlamaConvAttention(config, index)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, ShortConvolution):
            module.reset_parameters()


class LlamaConvForCausalLM(LlamaForCausalLM):
    """`LlamaForCausalLM` on a `LlamaConvModel`."""

    config: LlamaConvConfig

    def __init__(self, config: LlamaConvConfig):
        super().__init__(config)
        self.model = LlamaConvModel(config)
        self.post_init()


@strict
class GatedDeltaNetConfig(Qwen3NextConfig):
    """A `Qwen3NextConfig` whose every layer is a gated DeltaNet with a dense MLP."""

    model_type = "gated_deltanet"

    num_experts: int = 0
    # transformers cannot count the tokens of a cache that no attention layer fills.
    use_cache: bool = False

    def __post_init__(self, **kwargs):
        self.layer_types = ["linear_attention"] * self.num_hidden_layers
        self.mlp_only_layers = list(range(self.num_hidden_layers))
        super().__post_init__(**kwargs)


class GatedDeltaNetModel(Qwen3NextModel):
    """`Qwen3NextModel` whose layers retain their state for long at initialisation.

    transformers sets every `dt_bias` to 1: the state of a new layer then loses most of its content with each token.
    The authors' code (fla, `layers/gated_deltanet.py`) draws the time step log-uniformly between 0.001 and 0.1, and so
    does this class. After 120 steps of `small` on the built-in corpus at 4e-3 the loss is 4.163, and 4.168 with
    transformers' values (seed 1).
    """

    config: GatedDeltaNetConfig

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Qwen3NextGatedDeltaNet):
            step = torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)).exp()
            # The inverse of softplus.
            initialization.copy_(module.dt_bias, step + torch.log(-torch.expm1(-step)))


class GatedDeltaNetForCausalLM(Qwen3NextForCausalLM):
    """`Qwen3NextForCausalLM` on a `GatedDeltaNetModel`."""

    config: GatedDeltaNetConfig

    def __init__(self, config: GatedDeltaNetConfig):
        super().__init__(config)
        self.model = GatedDeltaNetModel(config)
        self.post_init()


@strict
class KimiDeltaConfig(KimiLinearConfig):
    """A `KimiLinearConfig` whose every layer is Kimi Delta Attention (decay per channel) with a dense MLP."""

    model_type = "kimi_delta"

    # Kimi's own tokens lie outside of smaller vocabularies.
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    rms_norm_eps: float = 1e-6
    # As in `GatedDeltaNetConfig`.
    use_cache: bool = False

    def __post_init__(self, **kwargs):
        self.layer_types = ["linear_attention"] * self.num_hidden_layers
        self.mlp_layer_types = ["dense"] * self.num_hidden_layers
        super().__post_init__(**kwargs)


class KimiDeltaForCausalLM(KimiLinearForCausalLM):
    """`KimiLinearForCausalLM` of a `KimiDeltaConfig`; transformers' initial values are its authors'."""

    config: KimiDeltaConfig

    def __init__(self, config: KimiDeltaConfig):
        super().__init__(config)
        # A vector stored with four axes.
        self._no_weight_decay = {name for name, _ in self.named_parameters() if name.endswith(".A_log")}


AutoConfig.register("llama_conv", LlamaConvConfig, exist_ok=True)
AutoModelForCausalLM.register(LlamaConvConfig, LlamaConvForCausalLM, exist_ok=True)
AutoConfig.register("gated_deltanet", GatedDeltaNetConfig, exist_ok=True)
AutoModelForCausalLM.register(GatedDeltaNetConfig, GatedDeltaNetForCausalLM, exist_ok=True)
AutoConfig.register("kimi_delta", KimiDeltaConfig, exist_ok=True)
AutoModelForCausalLM.register(KimiDeltaConfig, KimiDeltaForCausalLM, exist_ok=True)
