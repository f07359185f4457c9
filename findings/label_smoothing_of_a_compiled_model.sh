#!/usr/bin/env bash
# transformers 5.23.0: Trainer with `label_smoothing_factor` and `torch_compile` does not shift the labels of a Llama.
#
# Guess: torch_compile=True does not change the loss.
# Seen: the Trainer shifts the labels if the name of the model's class is in a list, and a compiled model is an
# OptimizedModule. It is trained to give each token itself instead of the next, and the sum over all tokens is divided
# by the number of shifted labels, one less a row. A model outside the list, remote code for one, gets the same without
# torch_compile. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 datasets==5.2.0
cd "$folder"
cat > program.py <<'PROGRAM'
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

torch.manual_seed(0)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
llama = LlamaForCausalLM(config).eval()
for parameter in llama.parameters():
    if parameter.ndim >= 2:
        torch.nn.init.normal_(parameter, std=0.3)
text = torch.randint(64, (1, 20))


def by_hand(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1).item()


compiled = sys.argv[1] == "compiled"
options = dict(torch_compile=True, torch_compile_backend="eager") if compiled else {}
arguments = TrainingArguments(
    "run", label_smoothing_factor=0.1, learning_rate=0.0, max_steps=1, per_device_train_batch_size=1,
    save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True, **options,
)
with torch.no_grad():
    logits = llama(text).logits[0]
shifted, unshifted = by_hand(logits[:-1], text[0, 1:]), by_hand(logits, text[0])
wrong = unshifted * 20 / 19
rows = [{"input_ids": text[0].tolist(), "labels": text[0].tolist()}]
seen = Trainer(llama, arguments, train_dataset=rows).train().training_loss
print(f"{sys.argv[1]}: by hand {shifted:.4f}, labels not shifted {wrong:.4f}; Trainer {seen:.4f}")
assert abs(seen - (wrong if compiled else shifted)) < 1e-3 < abs(shifted - wrong), "the behaviour changed"
PROGRAM
"$folder/env/bin/python" program.py plain
"$folder/env/bin/python" program.py compiled
