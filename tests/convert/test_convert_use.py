"""Uses of a converted model: learning levels, PEFT, int8 weights, evaluation, export; and conversion of GGUF files."""

import importlib.util
import json

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from sources import SIZES, random_ids
from transformers import AutoModelForCausalLM, AutoTokenizer, TorchAoConfig

from hope_hf import HopeCache
from hope_hf.evaluation import main as evaluate
from hope_hf.export import folder as export_folder
from hope_hf.export import main as export

pytestmark = [
    # Both still ask transformers 5.23 for attributes by their older names.
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning"),
]


@pytest.fixture
def hope(saved, converted):
    """The folder of a converted Qwen3, which has every new field but a bias."""
    return converted(saved("qwen3")[1])


def test_lora_trains_it(hope):
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(hope), LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    )
    ids = random_ids(2, 32)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad], lr=1e-2)
    losses = []
    for _ in range(8):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1


def test_its_levels_learn_while_it_reads(saved, converted):
    hope = converted(saved("llama")[1], "--levels", "16,32")
    model = AutoModelForCausalLM.from_pretrained(hope).eval()
    ids = random_ids(1, 64)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    model.config.level_learning.gate = False
    learned, plain = HopeCache(model.config), HopeCache(model.config)
    report = model.learn(ids, cache=learned)
    with torch.no_grad():
        model(ids, cache=plain)
        logits = [model(ids[:, :8], cache=cache).logits for cache in (learned, plain)]
    assert report is not None and not torch.allclose(*logits)
    assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())


def test_int8_weights(hope):
    torchao = pytest.importorskip("torchao.quantization")
    options = TorchAoConfig(torchao.Int8WeightOnlyConfig(version=2))
    quantized = AutoModelForCausalLM.from_pretrained(hope, quantization_config=options).eval()
    whole, ids = AutoModelForCausalLM.from_pretrained(hope).eval(), random_ids(1, 40)
    with torch.no_grad():
        expected, found = whole(ids).logits, quantized(ids).logits
    assert 0 < (found - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_evaluation_gives_the_loss_of_the_source(saved, converted, tmp_path):
    theirs, source = saved("llama")
    hope = converted(source)
    (tmp_path / "text.txt").write_text(" ".join(f"w{index}" for index in random_ids(600).tolist()), encoding="utf-8")
    losses = []
    for place in (source, hope):
        out = tmp_path / f"{place.name}-report"
        flags = ["--suite", "perplexity", "--validation_file", str(tmp_path / "text.txt"), "--lengths", "64"]
        assert evaluate(["--model_name_or_path", str(place), *flags, "--output_dir", str(out)]) == 0
        tables = json.loads((out / "results.json").read_text())["results"]["perplexity"]["tables"]
        losses.append(next(iter(tables.values()))[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_the_export_carries_it(hope, tmp_path, monkeypatch):
    monkeypatch.setattr(export_folder, "check_export", lambda *made: "")
    assert export([str(hope), "--to", str(tmp_path / "exported")]) == 0
    ours, theirs = (load_file(place / "model.safetensors") for place in (hope, tmp_path / "exported"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


NEEDS_GGUF = [] if importlib.util.find_spec("gguf") else [pytest.mark.long]
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers.": "blk.",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def write_gguf(path, model):
    """A Llama with a tokenizer of its 64 tokens, in float32."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_rope_freq_base(1e4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_license("mit")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*(chr(ord("!") + index) for index in range(61)), "AB", "<eos>", "<pad>"])
    writer.add_token_merges(["A B"])
    writer.add_eos_token_id(62)
    writer.add_bos_token_id(62)
    writer.add_pad_token_id(63)
    for name, weight in model.state_dict().items():
        array = weight.numpy().astype(np.float32)
        for map_name, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if map_name in name:
                # llama.cpp has the two halves of each rotated pair next to each other
                parts = array.reshape(SIZES[heads], 2, -1, array.shape[1])
                array = np.ascontiguousarray(parts.swapaxes(1, 2).reshape(array.shape))
        for ours, theirs in GGUF_NAMES.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", [pytest.param("llama", marks=NEEDS_GGUF)])
def test_a_gguf_file(kind, saved, converted, tmp_path):
    theirs, _ = saved(kind)
    (tmp_path / "files").mkdir()
    write_gguf(tmp_path / "files" / "tiny.gguf", theirs)
    folder = converted(tmp_path / "files", "--gguf_file", "tiny.gguf")
    ours, ids = AutoModelForCausalLM.from_pretrained(folder).eval(), random_ids(2, 50)
    with torch.no_grad():
        assert torch.equal(ours(ids).logits, theirs(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("AB", add_special_tokens=False)["input_ids"] == [61]
    assert "license: mit" in (folder / "README.md").read_text()
