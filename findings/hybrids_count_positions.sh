#!/usr/bin/env bash
# transformers 5.23.0: Bamba, and MiniMax that begins with a linear layer, place every later token at position 0.
#
# Guess: a token over a cache gets its position from the cache if no position_ids are given, as Llama, Jamba and
# Qwen3-Next do.
# Seen: Bamba counts positions from 0 in every call. MiniMax asks the cache for the length of layer 0, which is 0 where
# that layer is linear. Logits of single tokens are off; with position_ids they agree to 1e-4. No warning. Bamba's
# `generate` passes position_ids.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import BambaConfig, BambaForCausalLM, MiniMaxConfig, MiniMaxForCausalLM

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
SMALL |= dict(intermediate_size=48)
BAMBA = dict(attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8, mamba_d_state=8, mamba_chunk_size=8)
MINIMAX = dict(layer_types=["linear_attention", "full_attention"], head_dim=8, block_size=8, num_local_experts=2)


def differences(model):
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    text = torch.randint(2, 64, (1, 24))
    whole = model(text, use_cache=False).logits
    apart = []
    for named in (False, True):
        cache = model(text[:, :13], use_cache=True).past_key_values
        worst = 0.0
        for at in range(13, 24):
            given = {"position_ids": torch.tensor([[at]])} if named else {}
            logits = model(text[:, at : at + 1], past_key_values=cache, use_cache=True, **given).logits
            worst = max(worst, (logits[:, -1] - whole[:, at]).abs().max().item())
        apart.append(worst)
    return apart


torch.manual_seed(0)
with torch.no_grad():
    for model in (BambaForCausalLM(BambaConfig(**SMALL, **BAMBA)), MiniMaxForCausalLM(MiniMaxConfig(**SMALL, **MINIMAX))):
        counted, named = differences(model.eval())
        print(type(model).__name__, f"own positions: {counted:.1e}; given positions: {named:.1e}")
        assert counted > 1e-2 and named < 1e-3, "the behaviour changed"
PROGRAM
