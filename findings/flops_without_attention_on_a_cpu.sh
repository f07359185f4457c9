#!/usr/bin/env bash
# torch 2.13.0 and transformers 5.23.0: `FlopCounterMode` counts no attention of a model on a CPU.
#
# Guess: the FLOPs of a Llama's forward pass are the same whichever way it computes attention, and on whichever device.
# Seen: on a CPU with `sdpa`, the default, the products of queries, keys and values count as 0: at 4,096 tokens of this
# model 8 % of the FLOPs are counted. `eager` attention, or `sdpa` on the meta device, counts them all. No warning.
# torch 2.15.0 counts them on a CPU too.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

TOKENS, WIDTH = 4096, 64


def flops(run):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def of_model(attention):
    config = LlamaConfig(
        vocab_size=64, hidden_size=WIDTH, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, attn_implementation=attention,
    )
    model, text = LlamaForCausalLM(config), torch.zeros(1, TOKENS, dtype=torch.long)
    return flops(lambda: model(text, use_cache=False))


def of_attention(device):
    heads = torch.zeros(1, 2, TOKENS, WIDTH // 2, device=device)
    return flops(lambda: F.scaled_dot_product_attention(heads, heads, heads, is_causal=True))


products = 4 * TOKENS**2 * WIDTH
sdpa, eager, on_cpu, on_meta = of_model("sdpa"), of_model("eager"), of_attention("cpu"), of_attention("meta")
print(f"a Llama with sdpa {sdpa:,}, with eager {eager:,}: {sdpa / eager:.0%}")
print(f"attention alone: on a CPU {on_cpu:,}, on meta {on_meta:,}; its products {products:,}")
assert on_cpu == 0 and on_meta == products and eager - sdpa >= products, "the behaviour changed"
PROGRAM
