"""Matrix FLOPs of forward and backward per token, from a config and its shapes alone; the trainer counts the same."""

import math

from hope_hf.cli.flops import attention_flops_per_token

from .shapes import EMBEDDING, Shapes


def flops_per_token(config, shapes: Shapes, sequence_length: int) -> int:
    """HOPE: 6 per parameter of a matrix, and its mixers' own products (see `HopeForCausalLM.flops_per_token`).

    Others: 6 per parameter outside of embeddings that are only looked up, and attention's products. Recomputation is
    not counted.
    """
    if config.model_type != "hope":
        read = 6 * (shapes.count - shapes.units.get(EMBEDDING, 0))
        return read + 3 * attention_flops_per_token(config, sequence_length)
    return 6 * shapes.matrices + 3 * config.mixing_flops_per_token(sequence_length)


def cache_bytes(config, tokens: int) -> int:
    """fp32 bytes that one sequence carries after `tokens` tokens: HOPE's memories and tails, keys and values.

    Memories have the same size after any number of tokens: the weights now, and where the rule or memories that remake
    streams read them those of the chunk's start.
    """
    if config.model_type == "hope":
        width, heads = config.head_dim, config.num_memory_heads or 0
        layers = config.paper_rule["depth"] if config.memory_rule == "paper" else 1
        copies = 2 if config.memory_rule == "paper" or config.memory_projections else 1
        memories = copies * layers * (len(config.memory_projections) + 1) * width**2
        memory = heads * (memories + 3 * (config.conv_kernel_size - 1) * width)
        keys = 2 * tokens * (config.num_key_value_heads or 0) * width
        # whole blocks, their compressed keys, the convolutions' tail, and an int64
        slots = math.ceil(tokens / config.sparse_block_size) * config.sparse_block_size
        compressed, groups = slots // config.sparse_compress_stride, config.num_key_value_heads or 0
        tail = (config.conv_kernel_size - 1) * ((config.num_attention_heads or 0) + 2 * groups) * width
        sparse = 2 * (slots + compressed) * groups * width + tail + 2
        of_kind = {"hope_memory": memory, "sparse_attention": sparse, "full_attention": keys}
        return 4 * sum(of_kind[kind] for kind in config.layer_types)
    layers = config.num_hidden_layers
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4 * layers * 2 * tokens * heads * head
