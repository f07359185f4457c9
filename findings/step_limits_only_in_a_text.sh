#!/usr/bin/env bash
# transformers 5.23.0: the limits of Mamba-2's time steps hold while a text is read, and not token by token.
#
# Guess: with time_step_limit=(0.001, 0.1) reading token by token equals one call, as with the default (0, inf).
# Seen: the scan over a text clamps the steps, the update of a single token does not; logits are off by 1e-3 and more.
# Zamba2 clamps at its default time_step_min as well, so that a default Zamba2 differs too.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8, n_groups=1)


def difference(**limits):
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(Mamba2Config(**SMALL, chunk_size=8, **limits)).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    text, worst = torch.randint(2, 64, (1, 24)), 0.0
    whole = model(text, use_cache=False).logits
    cache = model(text[:, :13], use_cache=True).cache_params
    for at in range(13, 24):
        logits = model(text[:, at : at + 1], cache_params=cache, use_cache=True).logits
        worst = max(worst, (logits[:, -1] - whole[:, at]).abs().max().item())
    return worst


with torch.no_grad():
    limited, free = difference(time_step_limit=(0.001, 0.1)), difference()
print(f"with limits: {limited:.1e}; without: {free:.1e}")
assert limited > 1e-3 and free < 1e-4, "the behaviour changed"
PROGRAM
