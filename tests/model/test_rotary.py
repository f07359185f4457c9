"""Rope types whose frequencies depend on the length: one call, pieces, rows and packed texts agree, or are refused."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from learning_models import random_ids
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from hope_hf import CACHE_NAME, HopeCache
from hope_hf.model.attention import HopeRotaryEmbedding

LENGTH = 24
ROPE = {
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "longrope": dict(
        rope_type="longrope", factor=4.0, original_max_position_embeddings=LENGTH,
        short_factor=[1.0 + 0.1 * at for at in range(8)], long_factor=[4.0 + at for at in range(8)],
    ),
}  # fmt: skip
WINDOW = dict(layer_types=["window_attention"] * 2, sliding_window=8, attention_sinks=2)
ATTENTION = dict(layer_types=["full_attention"] * 2)
SPARSE = dict(layer_types=["hope_memory", "sparse_attention"], sparse_block_size=4, sparse_compress_stride=2)
SPARSE |= dict(sparse_top_k=2, sparse_window=4)


@pytest.fixture(params=ROPE)
def with_rope(request, tiny_model):
    """Build a float64 model with a rope type; texts of at most `LENGTH` tokens were trained."""

    def build(**options):
        fields = ROPE[request.param] | dict(rope_theta=100.0)
        longest = LENGTH if request.param == "dynamic" else 4 * LENGTH
        return tiny_model(torch.float64, max_position_embeddings=longest, rope_parameters=fields, **options)

    return build


@torch.no_grad()
def in_pieces(model, ids, sizes):
    cache = HopeCache(model.config)
    return torch.cat([model(piece, cache=cache).logits for piece in ids.split(sizes, dim=1)], dim=1)


def test_a_window_reads_any_text_the_same_in_any_pieces(with_rope):
    model, ids = with_rope(**WINDOW), random_ids(1, 60)
    whole = model(ids).logits
    for sizes in (1, 7, [40, 20]):
        torch.testing.assert_close(in_pieces(model, ids, sizes), whole, rtol=1e-9, atol=1e-9)
    # a short text beside, after and packed behind a long one
    short = random_ids(1, 12, seed=2)
    alone = model(short).logits
    padded = torch.cat([torch.zeros(1, 48, dtype=torch.long), short], dim=1)
    mask = torch.stack([torch.ones(60), torch.arange(60) >= 48]).long()
    beside = model(torch.cat([ids, padded]), attention_mask=mask).logits[1:, 48:]
    packed = model(torch.cat([ids, short], 1), position_ids=torch.cat([torch.arange(60), torch.arange(12)])[None])
    for found in (beside, packed.logits[:, 60:]):
        torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("options", [ATTENTION, SPARSE], ids=["attention", "sparse"])
def test_other_attention_refuses_texts_beyond_the_trained_length(with_rope, options):
    model, ids = with_rope(**options), random_ids(1, LENGTH + 1)
    cache = HopeCache(model.config)
    whole = model(ids[:, :LENGTH]).logits
    torch.testing.assert_close(in_pieces(model, ids[:, :LENGTH], 5), whole, rtol=1e-9, atol=1e-9)
    with torch.no_grad():
        model(ids[:, :LENGTH], cache=cache)
    for refused in (dict(input_ids=ids), dict(input_ids=ids[:, -1:], cache=cache)):
        with pytest.raises(ValueError, match=f"`rope_parameters` .* after {LENGTH} tokens"):
            model(**refused)
    assert model.config.longest_text == LENGTH
    # padding has no position
    mask = torch.ones(1, LENGTH + 4, dtype=torch.long)
    mask[:, :4] = 0
    padded = torch.cat([ids[:, :4], ids[:, :LENGTH]], dim=1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(padded, attention_mask=mask, position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)


def test_up_to_the_trained_length_values_are_llamas(with_rope):
    config = with_rope(**ATTENTION).config
    fields = dict(hidden_size=32, num_attention_heads=2, head_dim=16, num_hidden_layers=2, vocab_size=64)
    fields |= dict(rope_parameters=config.rope_parameters, max_position_embeddings=config.max_position_embeddings)
    llama = LlamaForCausalLM(LlamaConfig(intermediate_size=8, **fields)).model
    ours, positions = HopeRotaryEmbedding(config), torch.arange(LENGTH)[None]
    x = torch.zeros(1, dtype=torch.float64)
    expected = llama.rotary_emb(x, positions)
    assert all(torch.equal(*pair) for pair in zip(ours(x, positions), expected, strict=True))
    # the peer changes its own frequencies beyond
    llama(random_ids(1, 2 * LENGTH), **{CACHE_NAME: DynamicCache()})
    assert not torch.equal(llama.rotary_emb.inv_freq, ours.inv_freq)


def test_a_window_beyond_the_trained_length_is_refused(with_rope):
    with pytest.raises((ValueError, StrictDataclassError), match="`sliding_window` .*`rope_parameters`"):
        with_rope(**WINDOW | dict(sliding_window=LENGTH))
