#!/usr/bin/env bash
# peft 0.21.2 on Jamba of transformers 5.23.0: the adapter of `dt_proj` does nothing until it is merged.
#
# Guess: target_modules="all-linear" adapts every linear map that it wraps, or is refused: Mamba's `dt_proj`,
# `out_proj` and `conv1d` are.
# Seen: Jamba reads `dt_proj.weight` and never calls the module. Its adapter gets no gradient, changes no logits, and
# does after merge_and_unload, so that a merged adapter that holds other values there is another model. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2 accelerate==1.15.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from peft import LoraConfig, get_peft_model
from transformers import JambaConfig, JambaForCausalLM

torch.manual_seed(0)
config = JambaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, num_experts=2,
    num_experts_per_tok=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
)
base = JambaForCausalLM(config).eval()
for parameter in base.parameters():
    if parameter.ndim >= 2:
        torch.nn.init.normal_(parameter, std=0.2)
text = torch.randint(2, 64, (1, 24))
with torch.no_grad():
    before = base(text).logits
model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).eval()
adapted = {name: weight for name, weight in model.named_parameters() if "dt_proj.lora_B" in name}
for weight in adapted.values():
    torch.nn.init.normal_(weight, std=1.0)
model(input_ids=text, labels=text).loss.backward()
without = [name for name, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
with torch.no_grad():
    unmerged = (model(input_ids=text).logits - before).abs().max().item()
    merged = (model.merge_and_unload()(text).logits - before).abs().max().item()
print(f"adapted {len(adapted)}; without a gradient {without}; effect {unmerged:.1e}, merged {merged:.1e}")
assert adapted and without and all("dt_proj" in name for name in without), "the behaviour changed"
assert unmerged == 0 and merged > 1e-2, "the behaviour changed"
PROGRAM
