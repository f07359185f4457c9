"""Peers of HOPE that transformers does not have by name.

| model type | what it is |
|---|---|
| llama_conv | Llama with HOPE's short convolutions on queries, keys and values |
| gated_deltanet | Qwen3-Next with a gated DeltaNet and a dense MLP in every layer, as initialised by its authors |
| kimi_delta | Kimi Linear with Kimi Delta Attention and a dense MLP in every layer |
| gated_deltanet_2 | the same with the erase and write gates of Gated DeltaNet-2 (arXiv 2605.22791) |

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
_CHUNK = 16
_chunk_kimi = partial(modeling_kimi_linear.chunk_kimi_delta_attention, chunk_size=_CHUNK)


def _chunk_delta(query, key, value, g, beta, **options):
    """Kimi's scan, or for gates of every channel (`GatedDeltaNet2Attention`) that of Gated DeltaNet-2."""
    if beta.shape[-1] == query.shape[2]:
        return _chunk_kimi(query, key, value, g=g, beta=beta, **options)
    erase, write = beta.unflatten(-1, (2, query.shape[2], -1)).unbind(2)
    query, key = (modeling_kimi_linear.l2norm(x.float(), dim=-1, eps=1e-6) for x in (query, key))
    reads = scan_gated_delta_2(query, key, value.float(), g.float(), erase.float(), write.float())
    return reads.to(value.dtype), None


modeling_kimi_linear.chunk_kimi_delta_attention = _chunk_delta


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


@strict
class GatedDeltaNet2Config(KimiDeltaConfig):
    """A `KimiDeltaConfig` whose every layer is a Gated DeltaNet-2."""

    model_type = "gated_deltanet_2"


class GatedDeltaNet2Attention(modeling_kimi_linear.KimiLinearDeltaAttention):
    """Kimi Delta Attention with a gate per channel of keys that erases, and one per channel of values that writes.

    Both are sigmoids of full maps of the input (`b_proj`), as their authors have them.
    """

    def __init__(self, config: GatedDeltaNet2Config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.b_proj = nn.Linear(self.hidden_size, 2 * self.qkv_dim, bias=False)


class GatedDeltaNet2ForCausalLM(KimiDeltaForCausalLM):
    """`KimiDeltaForCausalLM` with `GatedDeltaNet2Attention` in every layer."""

    config: GatedDeltaNet2Config

    def __init__(self, config: GatedDeltaNet2Config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = GatedDeltaNet2Attention(config, index)
        self.post_init()


def scan_gated_delta_2(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    erase: torch.Tensor,
    write: torch.Tensor,
) -> torch.Tensor:
    """Reads [B, T, H, D] of the rule of Gated DeltaNet-2, in chunks; all arguments are [B, T, H, D].

        S_t = (I - k_t (b_t * k_t)^T) diag(e^(g_t)) S_{t-1} + k_t (w_t * v_t)^T,     read: q_t S_t / sqrt(D)

    Args:
        query, key: of norm 1.
        g: logarithm of the decay of every channel of keys.
        erase, write: b and w, from 0 to 1.
    """
    length, width = query.shape[1], query.shape[3]
    parts = (query * width**-0.5, key, erase * key, write * value, g)
    parts = (F.pad(x.transpose(1, 2), (0, 0, 0, -length % _CHUNK)).unflatten(2, (-1, _CHUNK)) for x in parts)
    query, key, erased, value, g = parts
    total = g.cumsum(-2)
    future = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=g.device).triu(1)
    # e^(T_i - T_j) for j <= i, else 0, of every channel
    decay = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(future.unsqueeze(-1), float("-inf")).exp()
    attention, lower = (torch.einsum("...id,...jd,...ijd->...ij", x, key, decay) for x in (query, erased))
    from_start, to_end = total.exp(), (total[..., -1:, :] - total).exp()
    right = torch.cat([value, erased * from_start], dim=-1)
    # the solver reads neither the diagonal of ones nor what is above it
    solved = torch.linalg.solve_triangular(lower, right, upper=False, unitriangular=True)
    written, taken = solved.split(width, dim=-1)
    state, reads = query.new_zeros(*query.shape[:2], width, width), []
    for index in range(query.shape[2]):
        new = written[:, :, index] - taken[:, :, index] @ state
        reads.append((query * from_start)[:, :, index] @ state + attention[:, :, index] @ new)
        kept = from_start[:, :, index, -1].unsqueeze(-1) * state
        state = kept + (key * to_end)[:, :, index].transpose(-1, -2) @ new
    return torch.stack(reads, dim=2).flatten(2, 3)[:, :, :length].transpose(1, 2)


AutoConfig.register("llama_conv", LlamaConvConfig, exist_ok=True)
AutoModelForCausalLM.register(LlamaConvConfig, LlamaConvForCausalLM, exist_ok=True)
AutoConfig.register("gated_deltanet", GatedDeltaNetConfig, exist_ok=True)
AutoModelForCausalLM.register(GatedDeltaNetConfig, GatedDeltaNetForCausalLM, exist_ok=True)
AutoConfig.register("kimi_delta", KimiDeltaConfig, exist_ok=True)
AutoModelForCausalLM.register(KimiDeltaConfig, KimiDeltaForCausalLM, exist_ok=True)
AutoConfig.register("gated_deltanet_2", GatedDeltaNet2Config, exist_ok=True)
AutoModelForCausalLM.register(GatedDeltaNet2Config, GatedDeltaNet2ForCausalLM, exist_ok=True)
