#!/usr/bin/env bash
# transformers 5.23.0: with rotary type `dynamic` a text's logits depend on the longest text that was read before.
#
# Guess: a forward without a cache gives the same logits whatever the model has read before; `longrope` and `dynamic`
# choose their frequencies by the text at hand.
# Seen: longrope does. dynamic keeps the frequencies of the longest text so far; only a text that is shorter than the
# trained length brings them back. One of the trained length or above gets them: after 64 tokens, logits of 40
# tokens, and of the trained 32, differ from those of a fresh model by 1 and more. So an evaluation depends on the
# order of its texts. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
DYNAMIC = dict(rope_type="dynamic", rope_theta=10000.0, factor=4.0)
LONGROPE = dict(rope_type="longrope", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=32)
LONGROPE |= dict(short_factor=[1.0] * 8, long_factor=[float(1 + at) for at in range(8)])


def differences(rope, longest):
    torch.manual_seed(0)
    config = LlamaConfig(**SMALL, max_position_embeddings=longest, rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    text = torch.randint(64, (1, 64))
    apart = {}
    for length in (20, 32, 40):
        fresh = LlamaForCausalLM(config).eval()
        fresh.load_state_dict(model.state_dict())
        first = fresh(text[:, :length]).logits
        fresh(text)
        apart[length] = (fresh(text[:, :length]).logits - first).abs().max().item()
    return apart


with torch.no_grad():
    dynamic, longrope = differences(DYNAMIC, 32), differences(LONGROPE, 128)
print("tokens: logits moved by a text of 64 tokens between. dynamic:", dynamic, "longrope:", longrope)
assert dynamic[20] < 1e-5 and min(dynamic[32], dynamic[40]) > 1e-1, "the behaviour changed"
assert max(longrope.values()) < 1e-5, "the behaviour changed"
PROGRAM
