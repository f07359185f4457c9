"""What trainer and planner count operations by."""

TF32_SHARE = 0.5
"""Of a GPU's matrix FLOP/s in bf16, those in TF32, in which fp32 runs multiply (`run_clm.py --tf32`, the default)."""


def attention_flops_per_token(config, sequence_length: int) -> int:
    """Forward FLOPs of causal attention's own products, of any model but HOPE, per token of a text of so many tokens.

    2 T a channel, as `HopeConfig.mixing_flops_per_token` counts; in layers with a window 4 for each key that it shows.
    """
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not heads:
        return 0
    channels = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = min(getattr(config, "sliding_window", None) or sequence_length, sequence_length)
    seen = window - window**2 / (2 * sequence_length)
    keys = {"full_attention": sequence_length / 2, "sliding_attention": seen, "chunked_attention": seen}
    return round(4 * channels * sum(keys.get(kind, 0) for kind in kinds))
