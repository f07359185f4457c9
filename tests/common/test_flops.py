"""Matrix FLOPs per token of any causal LM."""

from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.common.flops import attention_flops_per_token, flops_per_token


def test_hope_counts_itself():
    model = HopeForCausalLM(HopeConfig.from_preset("tiny", num_hidden_layers=1))
    assert flops_per_token(model, 128) == model.flops_per_token(128)


@pytest.mark.parametrize("tie", [False, True])
def test_a_table_that_is_only_looked_up_is_not_counted(tie):
    config = LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=96, vocab_size=100, num_attention_heads=4,
        tie_word_embeddings=tie,
    )  # fmt: skip
    matrices = 4 * 64 * 64 + 3 * 64 * 96 + 100 * 64
    norms = 3 * 64
    assert flops_per_token(LlamaForCausalLM(config), 128) == 6 * (matrices + norms) + 3 * 2 * 64 * 128


def test_attention_of_other_models_is_counted_as_hopes_own():
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, head_dim=16, vocab_size=32)
    hope = HopeConfig(num_hidden_layers=3, layer_types=["full_attention"] * 3, **sizes)
    counted = [attention_flops_per_token(LlamaConfig(num_hidden_layers=3, **sizes), tokens) for tokens in (128, 4096)]
    assert counted == [hope.mixing_flops_per_token(tokens) for tokens in (128, 4096)]
    assert counted[0] == 2 * 3 * 64 * 128
    kinds = ["full_attention", "sliding_attention", "linear_attention"]
    mixed = SimpleNamespace(**sizes, num_hidden_layers=3, layer_types=kinds, sliding_window=10)
    # A token sees half of the text, and 10 tokens but where fewer are before it; a long window changes nothing.
    assert attention_flops_per_token(mixed, 100) == 4 * 64 * (50 + 9.5)
    assert attention_flops_per_token(mixed, 10) == 4 * 64 * (5 + 5)
    assert attention_flops_per_token(MambaConfig(), 100) == 0
