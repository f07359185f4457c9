#!/usr/bin/env bash
# transformers 5.23.0: Mamba forgets the first turn when the second has more than one token.
#
# Guess: reading 13 tokens, then 5 more over the returned cache, gives the logits of one call of 18 tokens; Mamba-2,
# Qwen3-Next and Llama do so.
# Seen: the 5 tokens are read with the cache's convolution inputs, but from an empty state. Logits differ by 0.1 and
# more; token by token they agree to 1e-5. FalconMamba and Jamba behave alike. No warning.
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

text = torch.randint(2, 64, (1, 18))
with torch.no_grad():
    whole = model(text, use_cache=False).logits[:, 13:]
    cache = model(text[:, :13], use_cache=True).cache_params
    turn = model(text[:, 13:], cache_params=cache, use_cache=True).logits
    cache = model(text[:, :13], use_cache=True).cache_params
    singly = [model(text[:, at : at + 1], cache_params=cache, use_cache=True).logits for at in range(13, 18)]
apart = (turn - whole).abs().max().item()
stepped = (torch.cat(singly, dim=1) - whole).abs().max().item()
print(f"as one piece of 5: {apart:.1e}; token by token: {stepped:.1e}")
assert apart > 1e-2 and stepped < 1e-3, "the behaviour changed"
PROGRAM
