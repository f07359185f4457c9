"""Small models of the architectures that are converted, with random weights, biases and norms."""

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

# As many tokens as the word tokenizer of the tests has.
SIZES = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=62, pad_token_id=63,
)  # fmt: skip
LLAMA3 = dict(
    rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)
KINDS = {
    "llama": (LlamaConfig, {}),
    "tied": (LlamaConfig, dict(tie_word_embeddings=True, rope_parameters=LLAMA3)),
    "biases": (
        LlamaConfig,
        dict(attention_bias=True, mlp_bias=True, head_dim=16, num_key_value_heads=1, hidden_act="gelu"),
    ),
    "mistral": (MistralConfig, dict(sliding_window=None, head_dim=8, rope_parameters=YARN)),
    "qwen2": (Qwen2Config, dict(use_sliding_window=False, sliding_window=24)),
    "qwen3": (Qwen3Config, dict(head_dim=16, attention_bias=True, tie_word_embeddings=True)),
}


def config_of(kind: str, **options) -> PreTrainedConfig:
    """The configuration of a kind of model."""
    config_class, own = KINDS[kind]
    return config_class(**SIZES | own | options)


def model_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32):
    """The causal LM of a configuration, in evaluation mode."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype)


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """Token ids below those of the special tokens."""
    return torch.randint(62, shape, generator=torch.Generator().manual_seed(seed))
