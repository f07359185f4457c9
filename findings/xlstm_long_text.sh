#!/usr/bin/env bash
# transformers 5.23.0: xLSTM without a cache reads a text longer than max_inference_chunksize with states in bfloat16.
#
# Guess: `use_cache` does not change the logits of one call of a float32 model.
# Seen: above that length (16,384 by default, 16 here) the text is read in pieces, and the states between them lie in
# a cache of the model's own, which is bfloat16 whatever the weights are. Logits are off by 1e-2 from the second piece
# on; with use_cache=True the states are float32, and equal to 1e-4.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import xLSTMConfig, xLSTMForCausalLM

SMALL = dict(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_heads=2, chunk_size=8)


def model_of(piece):
    torch.manual_seed(0)
    model = xLSTMForCausalLM(xLSTMConfig(**SMALL, max_inference_chunksize=piece)).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


with torch.no_grad():
    whole_model, pieces_model = model_of(64), model_of(16)
    text = torch.randint(2, 64, (1, 40))
    whole = whole_model(text, use_cache=False).logits
    without = (pieces_model(text, use_cache=False).logits - whole).abs().amax(dim=(0, 2))
    cached = (pieces_model(text, use_cache=True).logits - whole).abs().max().item()
first, later = without[:16].max().item(), without[16:].max().item()
print(f"without a cache: first piece {first:.1e}, later {later:.1e}; with one: {cached:.1e}")
assert later > 1e-3 and first < 1e-4 and cached < 1e-3, "the behaviour changed"
PROGRAM
