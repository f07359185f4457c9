#!/usr/bin/env bash
# transformers 5.23.0: xLSTM and RWKV accept an attention_mask and read the padding all the same.
#
# Guess: RWKV's documentation says that its mask is not used; xLSTM's does not, so a left-padded batch gives each row's
# logits alone there, as Mamba does.
# Seen: both read padded tokens into their states. The shorter row's logits are off by 0.1 and more, so that a batch's
# texts depend on the longest of them. No warning. Both refuse beams with a cache (ValueError).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import MambaConfig, MambaForCausalLM, RwkvConfig, RwkvForCausalLM, xLSTMConfig, xLSTMForCausalLM


def difference(kind, config):
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.2)
    long, short = torch.randint(2, 64, (1, 24)), torch.randint(2, 64, (1, 9))
    batch = torch.cat([long, torch.cat([torch.zeros(1, 15, dtype=torch.long), short], dim=1)])
    with torch.no_grad():
        padded = model(batch, attention_mask=(batch > 0).long()).logits[1, -1]
        return (padded - model(short).logits[0, -1]).abs().max().item()


mamba = difference(MambaForCausalLM, MambaConfig(vocab_size=64, hidden_size=32, state_size=8, num_hidden_layers=2))
xlstm = difference(
    xLSTMForCausalLM, xLSTMConfig(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_heads=2, chunk_size=8)
)
rwkv = difference(
    RwkvForCausalLM, RwkvConfig(vocab_size=64, hidden_size=32, attention_hidden_size=32, num_hidden_layers=2)
)
print(f"Mamba {mamba:.1e}, xLSTM {xlstm:.1e}, RWKV {rwkv:.1e}")
assert mamba < 1e-4 and xlstm > 1e-2 and rwkv > 1e-2, "the behaviour changed"
PROGRAM
