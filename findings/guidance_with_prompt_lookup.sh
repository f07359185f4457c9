#!/usr/bin/env bash
# transformers 5.23.0: `guidance_scale` with `prompt_lookup_num_tokens` gives other greedy tokens than `guidance_scale`.
#
# Guess: candidates from the prompt make greedy decoding faster and leave its tokens; or the two are refused together.
# Seen: without guidance the tokens are the same. With guidance they differ within some steps: the part of the model
# without the prompt has a cache of its own, and a candidate that was not accepted stays in it. No warning. A logits
# processor without such a cache, with the same formula, gives the tokens of guidance alone both with and without
# candidates.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet --no-compile torch==2.13.0 transformers==5.23.0
cd "$folder"
"$folder/env/bin/python" - <<'PROGRAM'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SCALE, PROMPT = 2.0, 24


def build(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            torch.nn.init.normal_(parameter, std=0.3)
    return model, torch.randint(32, (1, 8)).repeat(1, PROMPT // 8)


def tokens(model, text, **options):
    return model.generate(text, max_new_tokens=24, do_sample=False, **options)[0, PROMPT:].tolist()


def both(model, text, **options):
    alone = tokens(model, text, **options)
    return alone, tokens(model, text, prompt_lookup_num_tokens=3, **options)


def without_cache(model):
    def guide(text, scores):
        bare = model(text[:, PROMPT - 1 :], use_cache=False).logits[:, -1].log_softmax(-1)
        return SCALE * (scores.log_softmax(-1) - bare) + bare

    return guide


for seed in range(3):
    model, text = build(seed)
    plain, plain_lookup = both(model, text)
    guided, guided_lookup = both(model, text, guidance_scale=SCALE)
    control, control_lookup = both(model, text, logits_processor=[without_cache(model)])
    print("guidance alone:", *guided)
    print("with candidates:", *guided_lookup)
    assert plain == plain_lookup and guided == control == control_lookup, "the behaviour changed"
    assert guided != guided_lookup, "the behaviour changed"
PROGRAM
