"""The models that benchmarks/quality.py compares: as large as HOPE, causal, and as described."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.quality.models import FROZEN, HOPE, MODELS, SIZES, Size, build
from benchmarks.quality.peers import LlamaConvConfig, convolve, scan_gated_delta_2
from hope_hf.model.memory_scan import unit
from hope_hf.optim import build_optimizer

pytestmark = pytest.mark.benchmarks

MICRO = Size(128, 2, 320, 4, 112, 669_000, 4, 3, (1e-3,), block_size=32, per_device_train_batch_size=2)
# hybrids have HOPE's heads
PEERS = [name for name in MODELS if name not in (HOPE, FROZEN) and not name.startswith("hope_hybrid")]


def new_model(name: str):
    torch.manual_seed(0)
    return build(name, MICRO).new()


def micro_llama(config_class, **options):
    torch.manual_seed(0)
    small = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(config_class(**small, **options)).double().eval()


@pytest.mark.parametrize("size", SIZES)
def test_all_models_have_the_parameters_of_hope(size):
    counts = {name: build(name, SIZES[size]).parameters for name in MODELS}
    low, high = {"small": (0.6e6, 1e6), "deep": (1e6, 1.2e6), "medium": (5e6, 10e6)}[size]
    assert low <= counts[HOPE] <= high and counts[FROZEN] == counts[HOPE]
    for name, count in counts.items():
        assert count == pytest.approx(counts[HOPE], rel=0.02), name


def test_another_division_of_hope_changes_no_peer():
    size = SIZES["medium"]
    fewer_heads = replace(size, memory_heads=size.memory_heads - 1, level_intermediate_size=70)
    assert build(HOPE, fewer_heads).identity != build(HOPE, size).identity
    for name in PEERS:
        assert build(name, fewer_heads).identity == build(name, size).identity, name


def test_every_model_is_another_one():
    models = [build(name, size) for name in MODELS for size in SIZES.values()]
    assert len({model.identity for model in models}) == len(models)
    for size in SIZES.values():
        shared = [json.loads(build(name, size).overrides) for name in MODELS]
        assert {o["hidden_size"] for o in shared} == {size.hidden_size}
        assert {o["vocab_size"] for o in shared} == {size.vocab_size}
        assert all(o["tie_word_embeddings"] for o in shared)


@pytest.mark.parametrize("name", PEERS)
def test_peers_are_causal_and_learn(name):
    model = new_model(name).train()
    input_ids = torch.randint(320, (2, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert math.isfinite(losses[0]) and losses[1] < losses[0]

    model.eval()
    changed = input_ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 320
    with torch.no_grad():
        before, after = (model(input_ids=ids, use_cache=False).logits for ids in (input_ids, changed))
    torch.testing.assert_close(before[:, :20], after[:, :20], atol=1e-5, rtol=1e-4)
    # Every later token of the row sees it, also 11 further on: no model is limited to a short range.
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 1e-5


def test_linear_peers_have_no_attention_and_no_experts():
    kinds = {name: {type(m).__name__ for m in new_model(name).modules()} for name in ("gated_deltanet", "kimi_linear")}
    assert "Qwen3NextGatedDeltaNet" in kinds["gated_deltanet"] and "KimiLinearDeltaAttention" in kinds["kimi_linear"]
    others = {"Qwen3NextAttention", "Qwen3NextSparseMoeBlock", "KimiLinearAttention", "KimiLinearMoE"}
    assert not others & set.union(*kinds.values())


@pytest.mark.parametrize("name", ["gated_deltanet", "kimi_linear", "gated_deltanet_2"])
def test_peers_that_forget_begin_with_long_memories(name):
    steps = [p for name, p in new_model(name).named_parameters() if name.endswith("dt_bias")]
    assert len(steps) == MICRO.num_hidden_layers
    for bias in steps:
        step = torch.nn.functional.softplus(bias)
        assert step.min() > 0.0009 and step.max() < 0.11 and step.unique().numel() > 0.9 * step.numel()


@pytest.mark.parametrize("name", ["hope", "gated_deltanet", "kimi_linear", "gated_deltanet_2"])
def test_rates_of_forgetting_take_no_weight_decay(name):
    model = new_model(name)
    settings = dict(learning_rate=1e-3, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8, tokens_per_step=64)
    decays = {p: group["weight_decay"] for group in build_optimizer(model, "adamw", **settings).param_groups
              for p in group["params"]}  # fmt: skip
    rates = {name: decays[p] for name, p in model.named_parameters() if name.endswith(("A_log", "dt_bias"))}
    assert len(rates) == 2 * MICRO.num_hidden_layers and set(rates.values()) == {0.0}
    assert max(decays.values()) == 0.1


def test_gated_deltanet_2_scans_as_its_authors_write_it_token_by_token():
    generator = torch.Generator().manual_seed(0)
    shape = (2, 37, 2, 8)
    query, key = (unit(torch.randn(shape, generator=generator, dtype=torch.float64)) for _ in range(2))
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    g, erase, write = (torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    state, reads = torch.zeros(2, 2, 8, 8, dtype=torch.float64), []
    for t in range(shape[1]):
        state = torch.exp(-g[:, t]).unsqueeze(-1) * state
        taken = torch.einsum("bhk,bhkv->bhv", erase[:, t] * key[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], write[:, t] * value[:, t] - taken)
        reads.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state) / 8**0.5)
    found = scan_gated_delta_2(query, key, value, -g, erase, write)
    torch.testing.assert_close(found, torch.stack(reads, 1), rtol=1e-12, atol=1e-12)


def test_gated_deltanet_2_with_one_gate_a_head_is_kimis():
    kimi, own = new_model("kimi_linear").eval(), new_model("gated_deltanet_2").eval()
    weights = {name: weight for name, weight in kimi.state_dict().items() if ".mlp." not in name}
    for name in [name for name in weights if name.endswith(".b_proj.weight")]:
        weights[name] = weights[name].repeat_interleave(kimi.config.linear_head_dim, 0).repeat(2, 1)
    missing, unexpected = own.load_state_dict(weights, strict=False)
    assert all(".mlp." in name for name in missing) and not unexpected
    input_ids = torch.randint(320, (2, 40))
    with torch.no_grad():
        for model in (kimi, own):
            for layer in model.model.layers:
                layer.mlp.down_proj.weight.zero_()
        expected, found = (model(input_ids=input_ids, use_cache=False).logits for model in (kimi, own))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_llama_conv_with_identity_convolutions_is_llama():
    llama, conv = micro_llama(LlamaConfig), micro_llama(LlamaConvConfig)
    _, unexpected = conv.load_state_dict(llama.state_dict(), strict=False)
    assert not unexpected
    taps = {name: weight for name, weight in conv.named_parameters() if "conv1d" in name}
    assert len(taps) == 6
    with torch.no_grad():
        for weight in taps.values():
            # HOPE's initialisation: uniform between -1/2 and 1/2.
            assert 0.25 < weight.std() < 0.33 and weight.abs().max() <= 0.5
            weight.zero_()[..., -1] = 1.0
    input_ids = torch.randint(50, (2, 12))
    expected, output = (model(input_ids=input_ids, use_cache=False).logits for model in (llama, conv))
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)


def test_convolution_equals_conv1d():
    x, weight = torch.randn(2, 9, 2, 3, dtype=torch.double), torch.randn(6, 1, 4, dtype=torch.double)
    padded = torch.nn.functional.pad(x.flatten(2).mT, (3, 0))
    expected = torch.nn.functional.conv1d(padded, weight, groups=6).mT.unflatten(-1, (2, 3))
    torch.testing.assert_close(convolve(x, weight.view(2, 3, 4).permute(2, 0, 1), None), expected)


def test_llama_conv_reads_nothing_of_the_document_before():
    model = micro_llama(LlamaConvConfig)
    first, second = torch.randint(50, (1, 7)), torch.randint(50, (1, 6))
    packed = model(
        input_ids=torch.cat([first, second], 1),
        position_ids=torch.cat([torch.arange(7), torch.arange(6)])[None],
        use_cache=False,
    ).logits
    alone = [model(input_ids=ids, use_cache=False).logits for ids in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-12, rtol=0)


def test_llama_conv_generates_without_a_cache():
    model = micro_llama(LlamaConvConfig)
    prompt = torch.randint(50, (1, 5))
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
    likeliest = model(input_ids=text, use_cache=False).logits.argmax(-1)
    assert torch.equal(text[:, 5:], likeliest[:, 4:-1])
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=prompt, use_cache=True)
