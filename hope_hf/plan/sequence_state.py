"""Bytes of a sequence's state: what a model holds of the tokens that it has read."""


def cache_bytes(config, tokens: int) -> int | None:
    """Bytes of one sequence's fp32 state after `tokens` tokens: HOPE's states, or keys and values.

    None for other architectures with layers that are no attention.
    """
    if config.model_type == "hope":
        return sum(mixer.cache_bytes(config, tokens) for mixer in config.mixers)
    window = getattr(config, "sliding_window", None)
    tokens_of = {"full_attention": tokens, "sliding_attention": min(tokens, window or tokens)}
    every = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    if not hasattr(config, "num_attention_heads") or not tokens_of.keys() >= set(kinds):
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    # A key and a value in fp32.
    bytes_of_token = 2 * 4 * heads * head_dim
    return bytes_of_token * sum(map(tokens_of.get, kinds))
