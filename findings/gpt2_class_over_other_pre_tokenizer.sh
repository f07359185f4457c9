#!/usr/bin/env bash
# transformers 5.23.0: AutoTokenizer of a folder in SmolLM2's form gives other ids than its tokenizer.json.
#
# Guess: a tokenizer.json is the whole tokenizer, and the class that tokenizer_config.json names adds special tokens and
# the longest text alone.
# Seen: `GPT2Tokenizer`, if tokenizer_config.json names it, takes vocabulary and merges and builds a
# pre-tokenizer of its own. SmolLM2's file splits digits off first: a run of spaces or newlines before a number is one
# piece there, and two here. No warning. `PreTrainedTokenizerFast` in the place of the name gives the file's ids. The
# library's issues report the same cause for Granite and OLMo 2, for which some names have an exception.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 tokenizers==0.23.3
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

TEXT = "In the year\n\n1969  27 people\n\n\nwent by the sea.   3 of them\n\n4 came back.\n" * 20
END = "<|endoftext|>"

original = Tokenizer(models.BPE())
digits = pre_tokenizers.Digits(individual_digits=True)
original.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
original.decoder = decoders.ByteLevel()
alphabet = pre_tokenizers.ByteLevel.alphabet()
trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=[END], show_progress=False)
original.train_from_iterator([TEXT], trainer)

for name in ("GPT2Tokenizer", "PreTrainedTokenizerFast"):
    Path(name).mkdir()
    original.save(f"{name}/tokenizer.json")
    settings = {"tokenizer_class": name, "bos_token": END, "eos_token": END, "unk_token": END}
    Path(name, "tokenizer_config.json").write_text(json.dumps(settings))
    Path(name, "config.json").write_text(json.dumps({"model_type": "llama"}))
    of_file = Tokenizer.from_file(f"{name}/tokenizer.json").encode(TEXT)
    read = AutoTokenizer.from_pretrained(name)
    ids = read(TEXT)["input_ids"]
    print(f"{name}: the file gives {len(of_file.ids)} tokens, AutoTokenizer {len(ids)}")
    print("   'a  1' is", read.tokenize("a  1"), "and in the file", original.encode("a  1").tokens)
    assert (ids == of_file.ids) == (name == "PreTrainedTokenizerFast"), "the behaviour changed"
    assert read.decode(ids) == TEXT, "the behaviour changed"
PROGRAM
