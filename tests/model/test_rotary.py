"""Rope types whose frequencies depend on the length: one call, pieces, rows and packed texts agree, or are refused."""

import pytest
import torch
import torch.nn.functional as F
from huggingface_hub.errors import StrictDataclassError
from mixers import random_ids
from transformers import LlamaConfig, LlamaForCausalLM

from hope_hf import HopeCache
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


EXACT = dict(rtol=1e-9, atol=1e-9)


@torch.no_grad()
def in_pieces(model, ids, sizes):
    cache = HopeCache(model.config)
    return torch.cat([model(piece, cache=cache).logits for piece in ids.split(sizes, dim=1)], dim=1)


def test_a_window_reads_any_text_the_same_in_any_pieces(with_rope):
    model, ids = with_rope(**WINDOW), random_ids(1, 60)
    whole = model(ids).logits
    for sizes in (1, [40, 20]):
        torch.testing.assert_close(in_pieces(model, ids, sizes), whole, **EXACT)
    # a short text packed behind a long one
    short = random_ids(1, 12, seed=2)
    positions = torch.cat([torch.arange(60), torch.arange(12)])[None]
    packed = model(torch.cat([ids, short], 1), position_ids=positions).logits
    torch.testing.assert_close(packed[:, 60:], model(short).logits, **EXACT)


@pytest.mark.parametrize("options", [ATTENTION, SPARSE], ids=["attention", "sparse"])
def test_other_attention_refuses_texts_beyond_the_trained_length(with_rope, options):
    model, ids = with_rope(**options), random_ids(1, LENGTH + 1)
    longest = ids[:, :LENGTH]
    assert model.config.longest_text == LENGTH
    whole = model(longest).logits
    torch.testing.assert_close(in_pieces(model, longest, 5), whole, **EXACT)
    # padding has no position
    padded = F.pad(longest, (4, 0))
    positions = F.pad(torch.arange(LENGTH)[None], (4, 0))
    found = model(padded, attention_mask=(padded != 0).long(), position_ids=positions).logits[:, 4:]
    torch.testing.assert_close(found, whole, **EXACT)
    cache = HopeCache(model.config)
    with torch.no_grad():
        model(longest, cache=cache)
    for call in (dict(input_ids=ids), dict(input_ids=ids[:, -1:], cache=cache)):
        with pytest.raises(ValueError, match=f"`rope_parameters` .* after {LENGTH} tokens"):
            model(**call)


def test_up_to_the_trained_length_values_are_llamas(with_rope):
    config = with_rope(**ATTENTION).config
    fields = dict(hidden_size=32, num_attention_heads=2, head_dim=16, num_hidden_layers=2, vocab_size=64)
    fields |= dict(rope_parameters=config.rope_parameters, max_position_embeddings=config.max_position_embeddings)
    llama = LlamaForCausalLM(LlamaConfig(intermediate_size=8, **fields)).model
    ours, positions = HopeRotaryEmbedding(config), torch.arange(LENGTH)[None]
    x = torch.zeros(1, dtype=torch.float64)
    expected = llama.rotary_emb(x, positions)
    torch.testing.assert_close(ours(x, positions), expected, rtol=0, atol=0)


def test_a_window_beyond_the_trained_length_is_refused(with_rope):
    with pytest.raises((ValueError, StrictDataclassError), match="`sliding_window` .*`rope_parameters`"):
        with_rope(**WINDOW | dict(sliding_window=LENGTH))
