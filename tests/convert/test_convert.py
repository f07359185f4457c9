"""A converted model has its source's logits, and is an ordinary model of this package."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from sources import KINDS, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hope_hf import HopeForCausalLM
from hope_hf.convert import folder as folder_module

TOLERANCE = 1e-5


@torch.no_grad()
def assert_equal_logits(theirs, ours, tolerance=0.0):
    """Logits of random ids, of a left-padded batch, and twenty greedy tokens after them."""
    ids = random_ids(2, 100)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    # Without positions a Llama counts columns, and HOPE tokens: alike but for the rounding of angles.
    of_tokens = (mask.cumsum(1) - 1).clamp(min=0)
    for given, positions in ((None, None), (mask, of_tokens)):
        expected, found = (
            model(ids, attention_mask=given, position_ids=positions).logits for model in (theirs, ours)
        )
        if given is not None:
            expected, found = (logits[given.bool()] for logits in (expected, found))
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))
        assert found.std() > 0.1
    without = [model(ids, attention_mask=mask).logits[mask.bool()] for model in (theirs, ours)]
    torch.testing.assert_close(*without, rtol=0, atol=TOLERANCE)
    options = dict(max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=63)
    tokens = (model.generate(ids, attention_mask=mask, **options) for model in (theirs, ours))
    assert torch.equal(*tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_greedy_tokens_are_those_of_the_source(kind, saved, converted):
    theirs, source = saved(kind)
    folder = converted(source)
    ours = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(ours) is HopeForCausalLM and set(ours.config.layer_types) == {"full_attention"}
    assert ours.config.level_learning is not None
    # one operation normalises here, and five there
    assert_equal_logits(theirs, ours, TOLERANCE if kind.startswith("qwen3") else 0.0)


WINDOWS = {
    "mistral": ("mistral", dict(sliding_window=24), ["window_attention"] * 3),
    "qwen2": ("qwen2", dict(use_sliding_window=True, sliding_window=24, max_window_layers=1),
              ["full_attention"] + ["window_attention"] * 2),
    "qwen3": ("qwen3", dict(use_sliding_window=True, sliding_window=24,
                            layer_types=["sliding_attention", "full_attention", "sliding_attention"]),
              ["window_attention", "full_attention", "window_attention"]),
    "qwen2-off": ("qwen2", dict(use_sliding_window=False, sliding_window=24, max_window_layers=1),
                  ["full_attention"] * 3),
}  # fmt: skip


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_the_source(name, saved, converted):
    kind, fields, kinds = WINDOWS[name]
    theirs, source = saved(kind, **fields)
    ours = AutoModelForCausalLM.from_pretrained(converted(source)).eval()
    assert ours.config.layer_types == kinds
    assert_equal_logits(theirs, ours, TOLERANCE)


def test_a_window_that_transformers_does_not_read(saved, converted):
    theirs, source = saved("llama")
    config = json.loads((source / "config.json").read_text())
    # longer than the text of the check
    (source / "config.json").write_text(json.dumps(config | {"sliding_window": 280}))
    ours = AutoModelForCausalLM.from_pretrained(converted(source)).eval()
    ids = random_ids(1, 400)
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=TOLERANCE)


def test_a_new_window_is_exact_while_the_text_is_shorter(saved, converted):
    theirs, source = saved("llama")
    ours = AutoModelForCausalLM.from_pretrained(converted(source, "--sliding_window", 128)).eval()
    config = ours.config
    assert (config.layer_types, config.sliding_window, config.attention_sinks) == (["window_attention"] * 3, 128, 4)
    assert_equal_logits(theirs, ours, TOLERANCE)
    ids = random_ids(1, 200)
    assert not torch.allclose(theirs(ids).logits, ours(ids).logits, atol=1e-2)


def test_weights_keep_their_bytes_and_files(saved, converted):
    theirs, source = saved("qwen2", dtype=torch.bfloat16, shard="12KB")
    folder = converted(source)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    before = json.loads((source / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == len(set(before["weight_map"].values())) > 3
    assert index["metadata"] == before["metadata"]
    for name, file in index["weight_map"].items():
        assert name in load_file(folder / file)
    ours = AutoModelForCausalLM.from_pretrained(folder)
    assert ours.dtype == ours.config.dtype == torch.bfloat16
    weights = sorted(weight.flatten().float().tolist() for weight in theirs.parameters())
    assert sorted(weight.flatten().float().tolist() for weight in ours.parameters()) == weights
    # loaded again, since `to` rounds the frequencies of positions, too
    assert_equal_logits(*(AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32).eval()
                          for place in (source, folder)))  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "biases", "tied"])
def test_levels_side_by_side_add_up_to_the_mlp(kind, saved, converted):
    theirs, source = saved(kind, intermediate_size=49)
    ours = AutoModelForCausalLM.from_pretrained(converted(source, "--levels", "512,2048,8192")).eval()
    config = ours.config
    assert (config.level_periods, config.level_intermediate_sizes) == ([512, 2048, 8192], [17, 16, 16])
    assert config.level_variant == "independent" and config.level_learning.periods == [512, 2048, 8192]
    assert_equal_logits(theirs, ours, TOLERANCE)


def test_new_memories_change_nothing_until_they_are_trained(saved, converted):
    theirs, source = saved("qwen3", num_hidden_layers=4)
    ours = AutoModelForCausalLM.from_pretrained(converted(source, "--memory_layers", "1,3")).eval()
    assert ours.config.layer_types == ["full_attention", "hope_memory"] * 2
    with torch.no_grad():
        for layer in (1, 3):
            theirs.model.layers[layer].self_attn.o_proj.weight.zero_()
    assert_equal_logits(theirs, ours, TOLERANCE)
    # the output map learns first, and the memories behind it once it is not zero
    ids = random_ids(1, 64)
    ours.train()(ids, labels=ids).loss.backward()
    gradients = [ours.model.layers[layer].mixer.o_proj.weight.grad.abs().max() for layer in (1, 3)]
    assert min(gradients) > 0
    mixers = [ours.model.layers[layer].mixer for layer in (1, 3)]
    assert not torch.equal(mixers[0].k_proj.weight, mixers[1].k_proj.weight)


def test_tokenizer_template_and_generation_config_are_carried_over(saved, converted, word_tokenizer):
    _, source = saved("llama")
    GenerationConfig(temperature=0.7, top_p=0.9, do_sample=True, eos_token_id=62).save_pretrained(source)
    folder = converted(source)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "w5 w6 w7"
    assert tokenizer(text) == word_tokenizer(text) and tokenizer.chat_template == word_tokenizer.chat_template
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.temperature == 0.7


def test_a_model_without_a_tokenizer_is_converted(saved, converted):
    theirs, source = saved("llama", tokenizer=False)
    assert_equal_logits(theirs, AutoModelForCausalLM.from_pretrained(converted(source)).eval())


def test_the_card_names_source_and_licence(saved, converted):
    _, source = saved("llama")
    (source / "README.md").write_text("---\nlicense: cc-by-4.0\n---\n\n# A model\n")
    page = (converted(source) / "README.md").read_text()
    assert "license: cc-by-4.0" in page and "| licence of the weights | cc-by-4.0 |" in page
    assert "A conversion of `source`" in page and str(source.parent) not in page
    assert "the largest difference to a logit of the source is\n0.0e+00" in page


def test_a_folder_on_a_disk_that_reads_wrongly_is_thrown_away(saved, refused, monkeypatch):
    _, source = saved("llama")
    write = folder_module.write_files

    def write_otherwise(files, config, dtype, folder):
        def weights(file, config, dtype):
            found = plain(file, config, dtype)
            found["model.layers.1.continuum.levels.0.up_proj.weight"][0, 0] += 1e-2
            return found

        plain = type(files[0]).weights
        monkeypatch.setattr(type(files[0]), "weights", weights)
        return write(files, config, dtype, folder)

    monkeypatch.setattr(folder_module, "write_files", write_otherwise)
    sentence = refused(source, status=1)
    assert "The converted model's logits differ by up to " in sentence and "nothing was written" in sentence


def test_weights_that_are_no_numbers_are_refused(saved, refused):
    _, source = saved("llama")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    assert "differ by up to nan" in refused(source, status=1)
