#!/usr/bin/env bash
# lm-eval 0.4.13: a second model that is evaluated with the same `use_cache` gets the first one's answers.
#
# Guess: the cache of answers belongs to a model, so that another model is asked anew.
# Seen: the key is the request alone. Another model's log-likelihoods of the same requests are read from the file, to
# the digit, and reported as its own. A checkpoint that was trained further, or another folder, is not asked again.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 lm-eval==0.4.13 accelerate==1.15.0 datasets==5.2.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import tempfile

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate([*letters, "<end>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def answers(seed, file=None):
    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    model = HFLM(pretrained=LlamaForCausalLM(config).eval(), tokenizer=tokenizer, batch_size=1, device="cpu")
    model = CachingLM(model, file) if file else model
    return model.loglikelihood([Instance("loglikelihood", {}, ("two and two is ", "four"), 0)])


file = tempfile.mkdtemp() + "/answers.db"
first, second = answers(1), answers(2)
cached = [answers(1, file), answers(2, file)]
print("each model:", first, second, "through one cache:", cached)
assert first != second and cached == [first, first], "the behaviour changed"
PROGRAM
