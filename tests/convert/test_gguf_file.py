"""Conversion of GGUF files: logits of an independent model in float64, and what is refused by name."""

import math

import gguf
import numpy as np
import pytest
import torch
from gguf_files import Gguf, plain_frequencies
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


@pytest.fixture
def file_of(tmp_path):
    """`file_of(model)` writes the only file of a folder; returns the folder and the flags that name the file."""

    def write(model):
        folder = tmp_path / "files"
        folder.mkdir(exist_ok=True)
        model.write(folder / "tiny.gguf")
        return folder, "--gguf_file", "tiny.gguf"

    return write


def assert_logits(model, folder, **positions):
    """The folder's logits of 300 tokens are those of the model."""
    ids = np.random.default_rng(1).integers(62, size=300)
    ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found = ours(torch.from_numpy(ids)[None]).logits[0].double().numpy()
    expected = model.logits(ids, **positions)
    assert expected.std() > 0.5
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4 * np.abs(expected).max())
    return ours.config


def llama3_factors(head_dim, base, factor, context):
    """By what Llama 3 divides the frequencies, as llama.cpp's converter writes it."""
    factors = []
    for frequency in plain_frequencies(head_dim, base):
        wave = 2 * math.pi / frequency
        smooth = (context / wave - 1) / 3
        factors.append(1 / (1 / factor + min(1, max(0, smooth)) * (1 - 1 / factor)))
    return np.array(factors, dtype=np.float32)


def yarn() -> tuple[np.ndarray, float]:
    """Frequencies and scale of transformers."""
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=128)
    peer = LlamaConfig(head_dim=16, max_position_embeddings=512, rope_parameters=rope)
    frequencies, scale = ROPE_INIT_FUNCTIONS["yarn"](peer, "cpu")
    return frequencies.double().numpy(), scale


ALL_BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
BLENDED = llama3_factors(8, 1e4, 8.0, 64)
YARN_FREQUENCIES, YARN_SCALE = yarn()
NEUTRAL = {
    "expert_count": 0,
    "logit_scale": 1.0,
    "attention.scale": 8**-0.5,
    "rope.dimension_count": 8,
    "rope.scaling.type": "none",
    "rope.scaling.factor": 4.0,
    "vocab_size": 64,
}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}
# The model, its fields and factors beyond the usual, and how it reads positions.
MODELS = {
    "neutral": (dict(), NEUTRAL, np.ones(4), {}),
    "llama-3": (dict(tied=True), {}, BLENDED, dict(frequencies=plain_frequencies(8) / BLENDED)),
    # without a type it is linear
    "three biases": (
        dict(biases=ALL_BIASES[:3]), {"rope.scaling.factor": 4.0}, None, dict(frequencies=plain_frequencies(8) / 4)
    ),
    "all biases": (
        dict(biases=ALL_BIASES), {"rope.scale_linear": 4.0}, None, dict(frequencies=plain_frequencies(8) / 4)
    ),
    "qwen2": (dict(architecture="qwen2"), {}, None, {}),
    "qwen3": (
        dict(architecture="qwen3", head_dim=16), YARN, None, dict(frequencies=YARN_FREQUENCIES, scale=YARN_SCALE)
    ),
    "window": (dict(), {"attention.sliding_window": 24}, None, dict(window=24)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_the_file(name, file_of, convert):
    options, fields, factors, positions = MODELS[name]
    model = Gguf(**options)
    model.fields |= fields
    if factors is not None:
        model.tensors["rope_freqs.weight"] = factors.astype(np.float32)
    # what transformers takes for an architecture
    model.others["general.name"] = "mistral"
    config = assert_logits(model, convert(*file_of(model)), **positions)
    kind = "window_attention" if name == "window" else "full_attention"
    assert set(config.layer_types) == {kind}


def test_quantised_weights_and_a_file_without_a_tokenizer(file_of, convert, capsys):
    model = Gguf()
    model.others = {"general.license": "mit"}
    written = dict(model.tensors)
    kind = gguf.GGMLQuantizationType.Q8_0
    for name in [name for name in written if "attn_v" in name or name == "token_embd.weight"]:
        quantised = gguf.quants.quantize(written[name], kind)
        model.tensors[name] = gguf.quants.dequantize(quantised, kind)
        assert not np.array_equal(model.tensors[name], written[name])
        written[name] = quantised
    exact, model.tensors = model.tensors, written
    source = file_of(model)
    model.tensors = exact
    folder = convert(*source)
    assert_logits(model, folder)
    assert not (folder / "tokenizer.json").exists()
    assert "license: mit" in (folder / "README.md").read_text()
    assert "Compared with transformers' llama with the fields and tensors of tiny.gguf" in capsys.readouterr().out


REFUSED = {
    "expert_count": dict(fields={"expert_count": 8}),
    "logit_scale": dict(fields={"logit_scale": 0.5}),
    "attention.head_count_kv": dict(fields={"attention.head_count_kv": [2, 4]}),
    "rope.scaling.type": dict(fields={"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}),
    "vocab_size": dict(fields={"vocab_size": 65}),
    "rope_freqs.weight": dict(tensors={"rope_freqs.weight": np.array([1, 2, 1, 8], dtype=np.float32)}),
    "blk.1.attn_q_norm.weight": dict(tensors={"blk.1.attn_q_norm.weight": np.ones(8, dtype=np.float32)}),
    "self_attn.k_proj.bias": dict(tensors={"blk.0.attn_q.bias": np.ones(32, dtype=np.float32)}),
    "blk.0.attn_k.weight": dict(tensors={"blk.0.attn_k.weight": np.ones((24, 32), dtype=np.float32)}),
    "split.count": dict(others={"split.count": 2}),
    "tokenizer.ggml.tokens": dict(others={"tokenizer.ggml.tokens": [f"t{index}" for index in range(65)],
                                          "tokenizer.ggml.token_type": [1] * 65, "tokenizer.ggml.merges": []}),
    "tokenizer.ggml.pre": dict(others={"tokenizer.ggml.pre": "of-tomorrow"}),
    "tokenizer.ggml.remove_extra_whitespaces": dict(others={"tokenizer.ggml.remove_extra_whitespaces": True}),
}  # fmt: skip


@pytest.mark.parametrize("named", REFUSED)
def test_what_is_not_understood_is_named(named, file_of, refused):
    model = Gguf()
    for attribute, values in REFUSED[named].items():
        getattr(model, attribute).update(values)
    sentence = refused(*file_of(model))
    assert sentence.startswith("error: --gguf_file tiny.gguf has ") or "split.count" in named
    assert named in sentence


def test_a_file_that_is_cut_or_lacks_a_weight(file_of, refused):
    model = Gguf()
    del model.tensors["blk.1.ffn_up.weight"]
    folder, *flags = file_of(model)
    assert "has no tensor for model.layers.1.mlp.up_proj.weight" in refused(folder, *flags)
    content = (folder / "tiny.gguf").read_bytes()
    (folder / "tiny.gguf").write_bytes(content[:-2000])
    assert "--gguf_file tiny.gguf cannot be read, it may be damaged" in refused(folder, *flags)


def test_the_original_tokenizer_beside_the_file_is_taken(file_of, convert, word_tokenizer):
    model = Gguf()
    tokens = word_tokenizer.convert_ids_to_tokens(range(64))
    model.others |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.pre": "of-tomorrow"}
    source = file_of(model)
    word_tokenizer.save_pretrained(source[0])
    made = AutoTokenizer.from_pretrained(convert(*source))
    assert made("w5 w6 w7") == word_tokenizer("w5 w6 w7") and made.chat_template == word_tokenizer.chat_template
