"""Small models that the planner's tests measure: their peaks lie in the loss and in the backward pass."""

from transformers import AutoConfig

from hope_hf import PRESETS

SMALL = {
    "pilot": {"model_type": "hope", **PRESETS["pilot"], "num_hidden_layers": 2},
    "tiny": {"model_type": "hope", **PRESETS["tiny"]},
    "clocks": {
        "model_type": "hope", **PRESETS["tiny"], "level_intermediate_sizes": [336, 336, 336],
        "level_periods": [1024, 4096, 16_384],
    },
    "sparse": {
        "model_type": "hope", **PRESETS["pilot-hybrid"], "num_hidden_layers": 1, "layer_types": ["sparse_attention"],
        "vocab_size": 256,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256,
    },
    # Attention on the CPU holds heads x tokens^2 numbers where it has dropout.
    "gpt2": {
        "model_type": "gpt2", "n_layer": 4, "n_embd": 256, "n_head": 4, "vocab_size": 4096, "bos_token_id": 0,
        "eos_token_id": 0, "attn_pdrop": 0.0,
    },
}  # fmt: skip
# Rows and tokens of each.
BATCHES = {
    "tiny": (2, 256), "clocks": (2, 256), "pilot": (1, 256), "sparse": (1, 512), "llama": (1, 64), "gpt2": (4, 128)
}  # fmt: skip


def small_config(name: str, **overrides):
    """The configuration of a small model."""
    return AutoConfig.for_model(**SMALL[name] | overrides)
