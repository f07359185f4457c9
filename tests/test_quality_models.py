"""The models that benchmarks/quality.py compares: as large as HOPE, causal, and as described."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.quality.models import FROZEN, HOPE, MODELS, SIZES, Size, build
from benchmarks.quality.peers import LlamaConvConfig, scan_gated_delta_2
from hope_hf.model.memory_scan import unit

pytestmark = pytest.mark.benchmarks

MICRO = Size(128, 2, 320, 4, 112, 669_000, 4, 3, (1e-3,), block_size=32, per_device_train_batch_size=2)
# hybrids have HOPE's heads
PEERS = [name for name in MODELS if name not in (HOPE, FROZEN) and not name.startswith("hope_hybrid")]


def micro_llama(config_class):
    torch.manual_seed(0)
    small = dict(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    return AutoModelForCausalLM.from_config(config_class(**small)).double().eval()


@pytest.mark.parametrize("size", SIZES)
def test_all_models_have_the_parameters_of_hope_and_are_other_models(size):
    size = SIZES[size]
    models = {name: build(name, size) for name in MODELS}
    assert len({model.identity for model in models.values()}) == len(models)
    assert models[FROZEN].parameters == models[HOPE].parameters
    for name, model in models.items():
        assert model.parameters == pytest.approx(models[HOPE].parameters, rel=0.02), name
        overrides = json.loads(model.overrides)
        assert (overrides["hidden_size"], overrides["vocab_size"]) == (size.hidden_size, size.vocab_size)


@pytest.mark.parametrize("name", PEERS)
def test_peers_are_causal_and_learn(name):
    torch.manual_seed(0)
    model = build(name, MICRO).new().train()
    input_ids = torch.randint(320, (2, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(2):
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]
    model.eval()
    changed = input_ids.clone()
    changed[:, 20] = (changed[:, 20] + 1) % 320
    with torch.no_grad():
        before = model(input_ids=input_ids, use_cache=False).logits
        after = model(input_ids=changed, use_cache=False).logits
    torch.testing.assert_close(before[:, :20], after[:, :20], atol=1e-5, rtol=1e-4)
    # every later token of the row sees it: no model is limited to a short range
    assert (before[:, 20:] - after[:, 20:]).abs().amax(-1).min() > 1e-5


def test_gated_deltanet_2_scans_as_its_authors_write_it_token_by_token():
    generator = torch.Generator().manual_seed(0)
    shape = (2, 37, 2, 8)
    query = unit(torch.randn(shape, generator=generator, dtype=torch.float64))
    key = unit(torch.randn(shape, generator=generator, dtype=torch.float64))
    value = torch.randn(shape, generator=generator, dtype=torch.float64)
    g, erase, write = torch.rand(3, *shape, generator=generator, dtype=torch.float64)
    state = torch.zeros(2, 2, 8, 8, dtype=torch.float64)
    reads = []
    for t in range(shape[1]):
        state = torch.exp(-g[:, t]).unsqueeze(-1) * state
        erased = torch.einsum("bhk,bhkv->bhv", erase[:, t] * key[:, t], state)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], write[:, t] * value[:, t] - erased)
        reads.append(torch.einsum("bhk,bhkv->bhv", query[:, t], state) / 8**0.5)
    scanned = scan_gated_delta_2(query, key, value, -g, erase, write)
    torch.testing.assert_close(scanned, torch.stack(reads, 1), rtol=1e-12, atol=1e-12)


def test_llama_conv_with_identity_convolutions_is_llama_and_sees_one_document():
    llama = micro_llama(LlamaConfig)
    conv = micro_llama(LlamaConvConfig)
    conv.load_state_dict(llama.state_dict(), strict=False)
    first, second = torch.randint(50, (1, 7)), torch.randint(50, (1, 6))
    both = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(7), torch.arange(6)])[None]
    packed = conv(input_ids=both, position_ids=positions, use_cache=False).logits
    alone = [conv(input_ids=ids, use_cache=False).logits for ids in (first, second)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-12, rtol=0)
    with torch.no_grad():
        for name, weight in conv.named_parameters():
            if "conv1d" in name:
                weight.zero_()[..., -1] = 1.0
    expected = llama(input_ids=both, use_cache=False).logits
    logits = conv(input_ids=both, use_cache=False).logits
    torch.testing.assert_close(logits, expected, atol=1e-12, rtol=0)
