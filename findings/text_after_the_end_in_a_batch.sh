#!/usr/bin/env bash
# lm-eval 0.4.13: `generate_until` answers otherwise at batch size 4 than at 1 where the model's generation settings
# name no end token.
#
# Guess: the tokenizer's end token is one of the stop sequences, so that an answer ends there at any batch size.
# Seen: at batch size 1 it does. In a batch, generation goes on until each row has met it, and the text is decoded
# without special tokens before stop sequences are looked for: the end token is gone, and what came after it is part of
# the answer. No warning. With `eos_token_id` in the generation settings both sizes agree.
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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END, MORE = 256, "more" * 6
ANSWERS = {"a:": "y", "bb:": "yes", "ccc:": "yesyes", "dddd:": "yesyesyes"}

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate([*letters, "<end>"])}, merges=[]))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
)
model = LlamaForCausalLM(config)
texts = [f"{question}{answer}<end>{MORE}" for question, answer in ANSWERS.items()]
batch = torch.tensor([tokenizer(text).input_ids[:24] for text in texts])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(200):
    model(batch, labels=batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def answers(batch_size, end):
    model.generation_config.eos_token_id = end
    judge = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu", max_length=128)
    settings = {"until": ["\n"], "max_gen_toks": 16, "do_sample": False}
    requests = [Instance("generate_until", {}, (question, settings), at) for at, question in enumerate(ANSWERS)]
    return judge.generate_until(requests, disable_tqdm=True)


right = list(ANSWERS.values())
for end in (END, None):
    alone, together = answers(1, end), answers(4, end)
    print(f"end token {end}: at batch size 1 {alone}, at 4 {together}")
    assert alone == right and (together == right) == (end == END), "the behaviour changed"
PROGRAM
