#!/usr/bin/env bash
# transformers 5.23.0 and torch 2.13.0: `model.to(torch.bfloat16)` is another model than
# `from_pretrained(dtype=torch.bfloat16)`.
#
# Guess: both give the same logits of a Llama.
# Seen: `to` rounds the rotary frequencies, a buffer, to bfloat16 as well; loading in that dtype leaves them in float32.
# At 2,000 tokens logits differ by 0.1 and more, and their distance from the float32 model is larger. Going back with
# `float()` does not restore them. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, max_position_embeddings=4096,
)
exact = LlamaForCausalLM(config).eval()
for parameter in exact.parameters():
    if parameter.ndim >= 2:
        torch.nn.init.normal_(parameter, std=0.2)
exact.save_pretrained("llama")
cast = LlamaForCausalLM.from_pretrained("llama").to(torch.bfloat16)
loaded = LlamaForCausalLM.from_pretrained("llama", dtype=torch.bfloat16)
text = torch.randint(64, (1, 2000))
with torch.no_grad():
    reference = exact(text).logits
    of_cast, of_loaded = cast(text).logits.float(), loaded(text).logits.float()
apart = (of_cast - of_loaded).abs().max().item()
errors = [(logits - reference).pow(2).mean().sqrt().item() for logits in (of_cast, of_loaded)]
back = (cast.float().model.rotary_emb.inv_freq - exact.model.rotary_emb.inv_freq).abs().max().item()
print(f"logits apart {apart:.2f}; error of to() {errors[0]:.3f}, of loading {errors[1]:.3f}; frequencies back {back:.1e}")
assert apart > 0.05 and errors[0] > 1.3 * errors[1] and back > 1e-5, "the behaviour changed"
PROGRAM
