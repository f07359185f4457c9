"""Attention that retains tokens, beyond what `test_equivalence.py` compares: equal scores, whatever the calls."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from mixers import RETAINING, WINDOW, random_ids

from hope_hf import HopeCache, HopeForCausalLM

PIECES = [3, 1, 1, 20, 1, 34]


@torch.no_grad()
def test_the_same_words_are_scored_alike_in_any_calls(tiny_model):
    """The older of two stays: rounding of products, which depends on the call's length, must not decide."""
    model = tiny_model(hidden_size=64, **RETAINING)
    embedded = model.model.embed_tokens(random_ids(4, 60))
    block = model.model.layers[0]
    inputs = block.input_layernorm(embedded)
    scores = block.mixer.scores
    together = scores(inputs)
    parts = map(scores, inputs.split(PIECES, dim=1))
    assert torch.equal(together, torch.cat([*parts], dim=1))
    assert len(together.unique()) > 50


@torch.no_grad()
def test_a_text_of_few_words_is_read_the_same_in_any_pieces(tiny_model):
    model = tiny_model(torch.float64, retained_tokens=[[3, 2], [5, 1]], **RETAINING)
    ids = random_ids(2, 60) % 11 + 1
    whole = model(ids).logits
    cache = HopeCache(model.config)
    logits = []
    for piece in ids.split(PIECES, dim=1):
        output = model(piece, cache=cache)
        logits.append(output.logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=0, atol=1e-10)


def test_layers_that_become_retaining_while_loading_need_numbers(tiny_model, tmp_path):
    tiny_model(**WINDOW).save_pretrained(tmp_path)
    with pytest.raises(StrictDataclassError) as refusal:
        HopeForCausalLM.from_pretrained(tmp_path, layer_types=["retaining_attention"] * 2)
    assert "`retained_tokens` is missing" in str(refusal.value.__cause__)
