"""Reading with frozen memories, and the mixture of its losses with those of live memories."""

import math

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hope_hf import HopeCache, HopeForCausalLM, frozen_memories
from hope_hf.frozen import mixed_losses


def test_a_mixture_of_losses_is_the_mean_of_likelihoods():
    torch.manual_seed(0)
    readings = [3 * torch.rand(2, 3, 40) for _ in range(3)]
    mixed = mixed_losses(readings)
    assert mixed.dtype == torch.float64 and mixed.shape == (2, 3, 40)
    for length in (1, 7, 40):
        of_the_text = torch.stack(readings)[..., :length].double().sum(-1)
        found = mixed[..., :length].sum(-1)
        torch.testing.assert_close(found, -(-of_the_text).exp().mean(0).log())
        assert (found <= of_the_text.amin(0) + math.log(3) + 1e-9).all()
    torch.testing.assert_close(mixed_losses(readings[:1]), readings[0].double())


@pytest.mark.parametrize("options", [{}, dict(memory_erase_bias=[-6.0, 3.0]), dict(memory_rule="paper")])
def test_frozen_memories_stay_as_they_are(tiny_config, options):
    """A call through the context equals one by its argument, and one by gates that are 0; also token by token."""
    model = HopeForCausalLM(tiny_config(**options)).double().eval()
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = HopeCache(model.config)

    def memories() -> list[torch.Tensor]:
        return [torch.stack(layer.state.current) for layer in cache.memory_layers]

    with torch.no_grad(), frozen_memories(model):
        logits = [model(ids[:, :6], cache=cache).logits]
        before = memories()
        for position in range(6, 12):
            logits.append(model(ids[:, position, None], cache=cache).logits)
    assert all(map(torch.equal, memories(), before))
    greedy = dict(max_new_tokens=3, do_sample=False, pad_token_id=0)
    written = model.generate(ids, freeze_memories=True, **greedy)

    def closed(module, inputs, gates):
        zero = torch.zeros_like(gates.rate)
        return gates._replace(rate=zero, log_retention=torch.zeros_like(gates.log_retention))

    for block in model.model.layers:
        block.mixer.gates.register_forward_hook(closed)
    torch.testing.assert_close(torch.cat(logits, 1), model(ids).logits, rtol=1e-9, atol=1e-9)
    assert torch.equal(written, model.generate(ids, **greedy))


def test_models_that_a_context_cannot_freeze_are_refused(tiny_model):
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=64))
    compiled = torch.compile(tiny_model(), backend="eager")
    for wrong, match in ((other, "cannot freeze memories"), (compiled, "freeze_memories=True")):
        with pytest.raises(ValueError, match=match), frozen_memories(wrong):
            pass
