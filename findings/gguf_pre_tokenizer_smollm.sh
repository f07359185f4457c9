#!/usr/bin/env bash
# transformers 5.23.0: the tokenizer of a GGUF file with pre-tokenizer `smollm` gives other ids than its original.
#
# Guess: the file has the pre-tokenizer's name, the vocabulary and the merges, so that AutoTokenizer gives the
# original's ids; a name that is not known is refused or warned about.
# Seen: `smollm` is not in the table, and the text is split as for GPT-2. SmolLM splits digits off first: a run of
# spaces or newlines before a number is one piece there, and two here. No warning. `qwen2`, which is known, agrees.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0 gguf==0.19.0 numpy
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import json

import gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
ORIGINALS = {
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "qwen2": [pre_tokenizers.Split(Regex(QWEN2), behavior="isolated"), BYTES],
}
TEXT = "In the year\n\n1969  27 people\n\n\nwent by the sea.   3 of them\n\n4 came back.\n" * 20


def ids(name):
    original = Tokenizer(models.BPE())
    original.pre_tokenizer = pre_tokenizers.Sequence(ORIGINALS[name])
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    original.train_from_iterator([TEXT], trainer)
    model = json.loads(original.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    file = gguf.GGUFWriter(f"{name}.gguf", "llama")
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(name)
    file.add_token_list(tokens)
    file.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    file.add_token_merges([" ".join(merge) for merge in model["merges"]])
    file.add_eos_token_id(0)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()
    read = AutoTokenizer.from_pretrained(".", gguf_file=f"{name}.gguf")
    return original.encode(TEXT).tokens, read.convert_ids_to_tokens(read(TEXT)["input_ids"])


for name in ORIGINALS:
    first, second = ids(name)
    print(name, f"{len(first)} tokens:", *first[:18], f"from the file {len(second)}:", *second[:18])
    assert (first == second) == (name == "qwen2"), "the behaviour changed"
PROGRAM
