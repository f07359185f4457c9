#!/usr/bin/env bash
# peft 0.21.2 with transformers 5.23.0: loading an adapter of which no tensor fits the model gives the bare model.
#
# Guess: PeftModel.from_pretrained of an adapter trained on a LlamaModel, loaded over a LlamaForCausalLM, where every
# name has one "model." more, raises.
# Seen: its target modules exist, so that a new adapter is made; every tensor of the file is left out, and a warning
# names the missing keys. The logits are the bare model's; with init_lora_weights=False they are those of a random
# adapter. Only target modules that exist nowhere raise.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 peft==0.21.2
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import warnings

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

SMALL = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


def moved(**options):
    """By how much an adapter of a LlamaModel moves the logits of a LlamaForCausalLM, and what was said."""
    torch.manual_seed(0)
    trained = get_peft_model(LlamaModel(LlamaConfig(**SMALL)), LoraConfig(r=4, target_modules=["q_proj"], **options))
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    trained.save_pretrained("adapter")
    llama = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    text = torch.randint(64, (1, 20))
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        bare = llama(text).logits
        adapted = PeftModel.from_pretrained(llama, "adapter").eval()(text).logits
    said = {str(warning.message).split(":")[0] for warning in caught if "adapter" in str(warning.message)}
    return (adapted - bare).abs().max().item(), said


nothing, said = moved()
something, _ = moved(init_lora_weights=False)
print(f"logits moved by {nothing}, with init_lora_weights=False by {something:.1e}; said:", *said)
assert nothing == 0 and something > 1e-4 and len(said) == 1, "the behaviour changed"
PROGRAM
