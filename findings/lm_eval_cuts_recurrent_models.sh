#!/usr/bin/env bash
# lm-eval 0.4.13: a Mamba, which has no longest text, is scored in windows of 2,048 tokens.
#
# Guess: a model whose config names no maximum reads a whole text in loglikelihood_rolling.
# Seen: the maximum falls back to 2,048. A text of 3,200 tokens is cut into two windows, and the second starts from an
# empty state: the sum is not the model's. Nothing says so. `max_length` of the model's arguments sets another length.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 lm-eval==0.4.13 accelerate==1.15.0 datasets==5.2.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate([*letters, "<end>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
torch.manual_seed(0)
model = MambaForCausalLM(MambaConfig(vocab_size=257, hidden_size=32, state_size=8, num_hidden_layers=2)).eval()
for parameter in model.parameters():
    if parameter.ndim >= 2:
        torch.nn.init.normal_(parameter, std=0.2)
text = "abcdefgh" * 400
tokens = torch.tensor([[256] + tokenizer(text, add_special_tokens=False).input_ids])
with torch.no_grad():
    scores = model(tokens).logits[0, :-1].log_softmax(-1)
whole = scores.gather(1, tokens[0, 1:, None]).sum().item()
sums = {}
for length in (None, 4096):
    judge = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=1, device="cpu", max_length=length)
    sums[judge.max_length] = judge.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)])[0]
print("by window:", sums, "whole:", whole)
assert set(sums) == {2048, 4096}, "the behaviour changed"
assert abs(sums[4096] - whole) < 0.5 < abs(sums[2048] - whole), "the behaviour changed"
PROGRAM
