#!/usr/bin/env bash
# transformers 5.23.0: a decoding step of Mamba with the mask of the whole text multiplies the new token by every
# column of the mask.
#
# Guess: after a left-padded batch, a step whose attention_mask covers padding, text and new token (the form that Llama
# and Mamba-2 take) gives each row's logits alone.
# Seen: with two rows or more the new token's hidden state of length 1 is broadcast against the mask of the whole
# text, and logits are off by 1 and more. With the mask of the new token alone they agree. `generate` passes no mask
# there, so that it is right. FalconMamba behaves alike.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
config = MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2)
model = MambaForCausalLM(config).eval()
for parameter in model.parameters():
    if parameter.ndim >= 2:
        torch.nn.init.normal_(parameter, std=0.2)

long, short, new = torch.randint(2, 64, (1, 24)), torch.randint(2, 64, (1, 9)), torch.full((2, 1), 7)
padding = torch.zeros(1, 15, dtype=torch.long)
batch = torch.cat([long, torch.cat([padding, short], dim=1)])
mask = (batch > 0).long()
whole_mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
with torch.no_grad():
    alone = model(torch.cat([short, new[:1]], dim=1), use_cache=False).logits[0, -1]

    def step(step_mask):
        cache = model(batch, attention_mask=mask, use_cache=True).cache_params
        logits = model(new, attention_mask=step_mask, cache_params=cache, use_cache=True).logits
        return (logits[1, -1] - alone).abs().max().item()

    covered, own = step(whole_mask), step(torch.ones_like(new))
print(f"mask of the whole text: {covered:.1e}; of the new token: {own:.1e}")
assert covered > 1e-1 and own < 1e-3, "the behaviour changed"
PROGRAM
