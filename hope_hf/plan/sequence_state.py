"""Bytes of a sequence's state: what a model holds of the tokens that it has read."""


def cache_bytes(config, tokens: int) -> int | None:
    """Bytes of one sequence's fp32 state after `tokens` tokens: HOPE's states, or keys and values.

    None for other architectures with layers that are no attention.
    """
    if config.model_type == "hope":
        size = 0
        for mixer in config.mixers:
            size += mixer.cache_bytes(config, tokens)
        return size
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        every = "sliding_attention" if window else "full_attention"
        kinds = [every] * config.num_hidden_layers
    tokens_of = {"full_attention": tokens, "sliding_attention": tokens}
    if window:
        tokens_of["sliding_attention"] = min(tokens, window)
    query_heads = getattr(config, "num_attention_heads", None)
    if query_heads is None or not tokens_of.keys() >= set(kinds):
        return None
    heads = getattr(config, "num_key_value_heads", None) or query_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // query_heads
    # A key and a value in fp32.
    bytes_of_token = 2 * 4 * heads * head_dim
    held = sum(map(tokens_of.get, kinds))
    return bytes_of_token * held
