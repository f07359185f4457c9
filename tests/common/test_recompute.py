"""`--gradient_checkpointing` changes what is kept from forward to backward, and no number."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoConfig, AutoModelForCausalLM

from hope_hf import HopeCache
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import parse_recomputed

LLAMA = dict(model_type="llama", hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2)
GPT2 = dict(model_type="gpt2", n_embd=32, n_layer=4, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
# Two layers a period, so that every second block is of either kind.
HYBRID = dict(layer_types=["hope_memory", "hope_memory", "full_attention", "full_attention"])


@pytest.fixture
def build(tiny_model):
    """A model of four blocks in float64, in training mode; the same at every call. GPT-2 has dropout."""

    def make(name: str):
        torch.manual_seed(0)
        if name in ("llama", "gpt2"):
            config = AutoConfig.for_model(**LLAMA if name == "llama" else GPT2, vocab_size=64)
            return AutoModelForCausalLM.from_config(config).double().train()
        kinds = {
            "hope": {}, "hope in groups": {"recompute_chunks": 2}, "paper": {"memory_rule": "paper"}, "hybrid": HYBRID,
            "attention": {"layer_types": ["full_attention"] * 4},
        }  # fmt: skip
        return tiny_model(torch.float64, num_hidden_layers=4, **kinds[name]).train()

    return make


def one_step(model, rows: torch.Tensor, cache=None) -> tuple[float, dict[str, torch.Tensor], int]:
    """Loss, gradients, and the bytes that autograd keeps beside the parameters."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # The tensor too, so that its address is not used again.
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    torch.manual_seed(1)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(rows, labels=rows, cache=cache, use_cache=cache is not None).loss
    size = sum(size for size, _ in kept.values())
    kept.clear()
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}, size


@pytest.mark.parametrize("name", ["hope in groups", "paper", "hybrid", "gpt2"])
def test_every_setting_has_the_loss_and_gradients_of_none_and_keeps_less(build, name):
    rows = torch.randint(64, (2, 48), generator=torch.Generator().manual_seed(2))
    found = {}
    for setting in ("none", "mixer", "every:2", "block"):
        model = build(name)
        recompute_activations(model, parse_recomputed(setting))
        found[setting] = one_step(model, rows)
    loss, gradients, whole = found.pop("none")
    for setting, (own_loss, own_gradients, kept) in found.items():
        assert own_loss == pytest.approx(loss, rel=1e-12, abs=0), setting
        # The names too: a checkpoint loads under every setting.
        assert own_gradients.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(own_gradients[parameter], gradient, rtol=1e-12, atol=1e-15)
        assert kept < whole, setting
    assert found["block"][2] < found["every:2"][2] < (whole + found["block"][2]) * 0.55
    assert found["block"][2] < found["mixer"][2]


@pytest.mark.parametrize("setting", ["mixer", "every:2"])
def test_carried_memories_are_read_once_and_go_on(build, setting):
    segments = torch.randint(64, (2, 42), generator=torch.Generator().manual_seed(2)).split([19, 23], dim=1)
    found = []
    for own in ("none", setting):
        model = build("hope")
        recompute_activations(model, parse_recomputed(own))
        cache = HopeCache(model.config)
        losses = []
        for segment in segments:
            losses.append(one_step(model, segment, cache)[0])
            cache.detach_()
        found.append((losses, [parameter.grad for parameter in model.parameters()], cache.state_tensors()))
    torch.testing.assert_close(found[1], found[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("setting", "blocks"), [("block", [0, 1, 2, 3]), ("every:2", [0, 2]), ("every:3", [0, 3])])
def test_the_blocks_that_are_recomputed(build, setting, blocks):
    model = build("llama")
    runs = dict.fromkeys(range(4), 0)
    for index, block in enumerate(model.model.layers):
        # A part of the block, whose own forward pass is wrapped.
        block.mlp.register_forward_pre_hook(lambda *_, index=index: runs.update({index: runs[index] + 1}))
    recompute_activations(model, parse_recomputed(setting))
    one_step(model, torch.zeros(1, 4, dtype=torch.long))
    assert [index for index, count in runs.items() if count == 2] == blocks


def test_a_mixer_is_recomputed_in_training_alone(build):
    model = build("llama")
    runs = []
    model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(lambda *_: runs.append(1))
    recompute_activations(model, parse_recomputed("mixer"))
    rows = torch.zeros(1, 4, dtype=torch.long)
    one_step(model, rows)
    assert len(runs) == 2
    one_step(model.eval(), rows)
    assert len(runs) == 3
    with torch.no_grad():
        model.generate(rows, max_new_tokens=2, do_sample=False, pad_token_id=0)


def test_an_architecture_without_such_a_part_is_refused(build, monkeypatch):
    model = build("llama")
    for block in model.model.layers:
        block.other = block._modules.pop("self_attn")
    with pytest.raises(ValueError, match="mixer finds no sequence mixer in the blocks of a llama: give block"):
        recompute_activations(model, parse_recomputed("mixer"))
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ValueError, match="--gradient_checkpointing finds no blocks in a llama"):
        recompute_activations(model, parse_recomputed("block"))
