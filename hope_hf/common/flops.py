"""Matrix FLOPs of a causal LM per token; trainer and planner count the same."""

from transformers import PreTrainedModel


def flops_per_token(model: PreTrainedModel, sequence_length: int) -> int:
    """FLOPs of forward and backward per token of a text of `sequence_length` tokens; recomputation is not counted.

    The model's own count, if it has one, as HOPE does. For others: 6 per parameter, without embeddings that are only
    looked up, plus attention's products. The model may be on the meta device.
    """
    if hasattr(model, "flops_per_token"):
        return model.flops_per_token(sequence_length)
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    read = 6 * (model.num_parameters() - (0 if tied else embedding.numel()))
    return read + 3 * attention_flops_per_token(model.config, sequence_length)


def attention_flops_per_token(config, sequence_length: int) -> int:
    """Forward FLOPs of causal attention's own products, of any model but HOPE, per token.

    2 T per channel for a text of T tokens; in layers with a sliding window, 4 per channel and key inside it.
    """
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or not heads:
        return 0
    channels = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    window = min(getattr(config, "sliding_window", None) or sequence_length, sequence_length)
    keys_in_window = window - window**2 / (2 * sequence_length)
    # By the kind of a layer, the mean number of keys that a token reads.
    keys = {
        "full_attention": sequence_length / 2,
        "sliding_attention": keys_in_window,
        "chunked_attention": keys_in_window,
    }
    return round(4 * channels * sum(keys.get(kind, 0) for kind in kinds))
