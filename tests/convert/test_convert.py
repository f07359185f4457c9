"""A converted model has its source's logits, and is an ordinary model of this package."""

import json

import pytest
import torch
from safetensors.torch import save_file
from sources import KINDS, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hope_hf import HopeForCausalLM
from hope_hf.convert import weights as weights_module

TOLERANCE = 1e-5


def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def assert_equal_logits(theirs, ours, tolerance=TOLERANCE):
    """Logits of random ids, of a left-padded batch, and eight greedy tokens after them."""
    ids = random_ids(2, 100)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    # Without positions a Llama counts columns, and HOPE tokens: alike but for the rounding of angles.
    of_tokens = (mask.cumsum(1) - 1).clamp(min=0)
    calls = [
        (tolerance, {}),
        (tolerance, dict(attention_mask=mask, position_ids=of_tokens)),
        (TOLERANCE, dict(attention_mask=mask)),
    ]
    for most, options in calls:
        is_token = options.get("attention_mask", torch.ones_like(ids)).bool()
        expected, found = theirs(ids, **options).logits[is_token], ours(ids, **options).logits[is_token]
        torch.testing.assert_close(found, expected, rtol=0, atol=most)
        assert torch.equal(found.argmax(-1), expected.argmax(-1)) and found.std() > 0.1
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=63, attention_mask=mask)
    assert torch.equal(theirs.generate(ids, **options), ours.generate(ids, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_are_those_of_the_source(kind, saved, convert):
    theirs, source = saved(kind)
    ours = loaded(convert(source))
    assert type(ours) is HopeForCausalLM and set(ours.config.layer_types) == {"full_attention"}
    assert ours.config.level_learning is not None
    # one operation normalises here, and five there
    assert_equal_logits(theirs, ours, TOLERANCE if kind == "qwen3" else 0.0)


WINDOWS = {
    "mistral": (dict(sliding_window=24), ["window_attention"] * 3),
    "qwen2": (
        dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
        ["full_attention", "window_attention", "window_attention"],
    ),
    "qwen3": (
        dict(
            use_sliding_window=True,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        ["window_attention", "full_attention", "window_attention"],
    ),
}


@pytest.mark.parametrize("kind", WINDOWS)
def test_windows_of_the_source(kind, saved, convert):
    fields, kinds = WINDOWS[kind]
    theirs, source = saved(kind, **fields)
    ours = loaded(convert(source))
    assert ours.config.layer_types == kinds
    assert_equal_logits(theirs, ours)


def test_fields_of_other_programs_change_nothing(saved, convert):
    theirs, source = saved("llama")
    config = json.loads((source / "config.json").read_text())
    # the window is longer than the text of the check, and transformers does not read it
    config |= dict(sliding_window=280, rope_interleaved=False, is_llama_config=True, pretraining_tp=2)
    (source / "config.json").write_text(json.dumps(config | {"torch_dtype": "float32"}))
    ids = random_ids(1, 400)
    torch.testing.assert_close(loaded(convert(source))(ids).logits, theirs(ids).logits, rtol=0, atol=TOLERANCE)


def test_a_new_window_is_exact_while_the_text_is_shorter(saved, convert):
    theirs, source = saved("llama")
    ours = loaded(convert(source, "--sliding_window", 128))
    config = ours.config
    assert (config.layer_types, config.sliding_window, config.attention_sinks) == (["window_attention"] * 3, 128, 4)
    assert_equal_logits(theirs, ours)
    ids = random_ids(1, 200)
    assert not torch.allclose(theirs(ids).logits, ours(ids).logits, atol=1e-2)

def test_a_new_window_has_1024_tokens(saved, convert):
    _, source = saved("llama")
    assert loaded(convert(source, "--sliding_window")).config.sliding_window == 1024


def test_weights_keep_their_bytes_and_files(saved, convert):
    theirs, source = saved("qwen2", dtype=torch.bfloat16, shard="12KB", tokenizer=False)
    folder = convert(source)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    before = json.loads((source / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(set(before["weight_map"].values())) > 3
    assert index["metadata"] == before["metadata"]
    ours = AutoModelForCausalLM.from_pretrained(folder)
    assert ours.dtype == ours.config.dtype == torch.bfloat16
    expected = sorted(weight.flatten().tolist() for weight in theirs.parameters())
    assert sorted(weight.flatten().tolist() for weight in ours.parameters()) == expected
    # loaded again, since `to` rounds the frequencies of positions, too
    assert_equal_logits(loaded(source), loaded(folder), 0.0)


def test_levels_side_by_side_add_up_to_the_mlp(saved, convert):
    theirs, source = saved("biases", intermediate_size=49)
    ours = loaded(convert(source, "--levels", "512,2048,8192"))
    config = ours.config
    assert (config.level_periods, config.level_intermediate_sizes) == ([512, 2048, 8192], [17, 16, 16])
    assert config.level_variant == "independent" and config.level_learning.periods == [512, 2048, 8192]
    assert_equal_logits(theirs, ours)


def test_new_memories_change_nothing_until_they_are_trained(saved, convert):
    theirs, source = saved("qwen3", num_hidden_layers=4)
    ours = loaded(convert(source, "--memory_layers", "1,3"))
    assert ours.config.layer_types == ["full_attention", "hope_memory"] * 2
    with torch.no_grad():
        for layer in (1, 3):
            for parameter in theirs.model.layers[layer].self_attn.o_proj.parameters():
                parameter.zero_()
    assert_equal_logits(theirs, ours)
    # the output map learns first, and the memories behind it once it is not zero
    ids = random_ids(1, 64)
    ours.train()(ids, labels=ids).loss.backward()
    first, second = (ours.model.layers[layer].mixer for layer in (1, 3))
    assert first.o_proj.weight.grad.any() and second.o_proj.weight.grad.any()
    assert not torch.equal(first.k_proj.weight, second.k_proj.weight)


def test_tokenizer_settings_and_licence_are_carried_over(saved, convert, word_tokenizer):
    _, source = saved("llama")
    GenerationConfig(temperature=0.7, top_p=0.9, do_sample=True, eos_token_id=62).save_pretrained(source)
    (source / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n\n# A model\n")
    folder = convert(source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("w5 w6") == word_tokenizer("w5 w6") and tokenizer.chat_template == word_tokenizer.chat_template
    assert loaded(folder).generation_config.temperature == 0.7
    page = (folder / "README.md").read_text()
    assert "license: cc-by-4.0" in page and "`source`" in page and str(source.parent) not in page
    # the largest difference of a logit
    assert "0.0e+00" in page


def test_a_folder_whose_weights_differ_is_thrown_away(saved, refused, monkeypatch):
    _, source = saved("llama")

    def save(weights, *arguments, **options):
        weights["model.layers.1.continuum.levels.0.up_proj.weight"][0, 0] += torch.nan
        save_file(weights, *arguments, **options)

    # as on a disk that reads wrongly
    monkeypatch.setattr(weights_module, "save_file", save)
    sentence = refused(source, status=1)
    assert "logits differ by up to " in sentence and "nothing was written" in sentence
