"""The mixture of readings with live and with frozen memories, against one that reads everything at once."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

from hope_hf import CACHE_NAME, FrozenMixture, HopeCache, HopeForCausalLM, frozen, frozen_memories
from hope_hf.frozen import mixed_losses


@pytest.fixture
def model(tiny_config):
    torch.manual_seed(0)
    model = HopeForCausalLM(tiny_config(memory_learning_rate_bias=[0.0, 2.0])).double().eval()
    with torch.no_grad():
        # far enough from uniform that both readings differ, and one of them is better
        model.lm_head.weight.mul_(20)
    return model


@torch.no_grad()
def losses_of(model, input_ids):
    """[B, T-1] of live and of frozen memories, and the log-probabilities of the next token [B, vocab_size] by each."""
    found = []
    for freezes in (False, True):
        with frozen_memories(model) if freezes else nullcontext():
            logits = model(input_ids=input_ids, use_cache=False).logits
        losses = F.cross_entropy(logits[:, :-1].mT, input_ids[:, 1:], reduction="none")
        found.append((losses, logits[:, -1].log_softmax(-1)))
    return zip(*found, strict=True)


def test_a_mixture_of_losses_is_the_mean_of_likelihoods():
    torch.manual_seed(0)
    readings = [3 * torch.rand(2, 3, 40) for _ in range(3)]
    mixed = mixed_losses(readings)
    assert mixed.dtype == torch.float64 and mixed.shape == (2, 3, 40)
    for length in (1, 7, 40):
        likelihoods = [torch.exp(-losses[..., :length].double().sum(-1)) for losses in readings]
        expected = -torch.log(sum(likelihoods) / 3)
        torch.testing.assert_close(mixed[..., :length].sum(-1), expected)
        best = torch.stack([losses[..., :length].double().sum(-1) for losses in readings]).amin(0)
        assert (mixed[..., :length].sum(-1) <= best + math.log(3) + 1e-9).all()
    torch.testing.assert_close(mixed_losses(readings[:1]), readings[0].double())


def test_a_mixture_forgets_the_worse_reading():
    good, bad = torch.full((1000,), 1.0), torch.full((1000,), 1.5)
    for readings in ((good, bad), (bad, good)):
        mixed = mixed_losses(readings)
        assert mixed.sum() - good.sum() == pytest.approx(math.log(2), abs=1e-6)
        torch.testing.assert_close(mixed[100:].float(), good[100:])


@pytest.mark.parametrize("piece", [5, 1024])
def test_generate_predicts_with_the_mixture(model, monkeypatch, piece):
    monkeypatch.setattr(frozen, "_PIECE", piece)
    prompt = torch.randint(1, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    found = model.generate(
        prompt, max_new_tokens=12, do_sample=False, logits_processor=[FrozenMixture(model)], output_scores=True,
        return_dict_in_generate=True, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    for step, scores in enumerate(found.scores):
        text = found.sequences[:, : prompt.shape[1] + step]
        losses, following = losses_of(model, text)
        likelihoods = -torch.stack(losses).sum(-1)
        expected = (torch.stack(following) + likelihoods.log_softmax(0).unsqueeze(-1)).logsumexp(0)
        torch.testing.assert_close(scores, expected.float(), rtol=1e-4, atol=1e-4)
        # both readings count: neither alone predicts so
        assert all((alone - expected).abs().max() > 1e-2 for alone in following) or step > 0
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(2))


def test_a_prompt_of_one_token_weighs_both_the_same(model):
    prompt = torch.tensor([[3]])
    with torch.no_grad():
        logits = model(input_ids=prompt).logits[:, -1]
    _, following = losses_of(model, prompt)
    mixed = FrozenMixture(model)(prompt, logits)
    torch.testing.assert_close(mixed, torch.stack(list(following)).exp().mean(0).log().float(), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_mixed_is_refused(model, tiny_config):
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=64))
    for without in (HopeForCausalLM(tiny_config(layer_types=["full_attention"] * 2)), other):
        with pytest.raises(ValueError, match="needs a HOPE with memories"):
            FrozenMixture(without)
    prompt = torch.randint(1, 64, (1, 9), generator=torch.Generator().manual_seed(1))
    with pytest.raises(ValueError, match="without beams"):
        model.generate(prompt, num_beams=3, max_new_tokens=8, logits_processor=[FrozenMixture(model)], pad_token_id=0)
    mixture = FrozenMixture(model)
    options = dict(max_new_tokens=3, do_sample=False, logits_processor=[mixture], pad_token_id=0)
    model.generate(prompt, **options)
    with pytest.raises(ValueError, match="one call of generate"):
        model.generate(prompt, **options)


@pytest.mark.parametrize("options", [{}, dict(memory_erase_bias=[-6.0, 3.0]), dict(memory_rule="paper")])
def test_frozen_memories_stay_as_they_are(tiny_config, options):
    """A call through the context equals one by its argument, and one by gates that are 0; also token by token."""
    model = HopeForCausalLM(tiny_config(**options)).double().eval()
    ids = torch.randint(1, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    cache = HopeCache(model.config)
    with torch.no_grad(), frozen_memories(model):
        first = model(ids[:, :6], cache=cache)
        before = [layer.state.current for layer in first[CACHE_NAME].memory_layers]
        tokens = torch.cat([first.logits, *(model(ids[:, at, None], cache=cache).logits for at in range(6, 12))], 1)
    after = [layer.state.current for layer in cache.memory_layers]
    for pairs in zip(before, after, strict=True):
        assert all(torch.equal(held, new) for held, new in zip(*pairs, strict=True))
    written = model.generate(ids, max_new_tokens=3, freeze_memories=True, do_sample=False, pad_token_id=0)
    for block in model.model.layers:
        block.mixer.gates.register_forward_hook(
            lambda _, __, gates: (torch.zeros_like(gates[0]), torch.zeros_like(gates[1]), *gates[2:])
        )
    torch.testing.assert_close(tokens, model(ids).logits, rtol=1e-9, atol=1e-9)
    assert torch.equal(written, model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0))


def test_models_that_a_context_cannot_freeze_are_refused(model):
    other = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=1, n_embd=8, vocab_size=64))
    compiled = torch.compile(model, backend="eager")
    for wrong, match in ((other, "cannot freeze memories"), (compiled, "freeze_memories=True")):
        with pytest.raises(ValueError, match=match), frozen_memories(wrong):
            pass
