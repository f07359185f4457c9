"""Mixers of sparse attention, small and in float64, and texts for them."""

import torch

from hope_hf import HopeConfig, HopeForCausalLM

WIDTH = 32
FEW = dict(sparse_block_size=8, sparse_compress_stride=4, sparse_top_k=4, sparse_window=16)


def random_model(**options):
    """Of one layer; attention is far from a mean."""
    torch.manual_seed(0)
    fields = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, layer_types=["sparse_attention"])
    config = HopeConfig(vocab_size=16, hidden_size=WIDTH, num_hidden_layers=1, **fields | options)
    model = HopeForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.model.layers[0].mixer.parameters():
            parameter.copy_(torch.randn_like(parameter) / parameter.shape[-1] ** 0.5 * 1.5)
    return model


def texts(*shape, seed=1):
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixed(model, hidden_states):
    """What the mixer makes of embeddings [B, T, hidden_size], which go through a norm first, and what it gets."""
    read, mixer = [], model.model.layers[0].mixer
    hook = mixer.register_forward_hook(lambda _, inputs, output: read.append((inputs[0], output[0])))
    model.model(inputs_embeds=hidden_states, use_cache=False)
    hook.remove()
    return read[0]
