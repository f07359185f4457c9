"""Where the weights of a loaded model lie, and what loading says of a checkpoint that does not fit."""

import copy

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from mixers import MIXED, STATES
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hope_hf import HopeCache, HopeForCausalLM
from hope_hf.model.loss import HopeHead


def random_ids(*shape):
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("where", ["auto", "disk"])
def test_weights_may_lie_anywhere(tiny_model, tmp_path, where):
    model = tiny_model(**MIXED)
    model.save_pretrained(tmp_path)
    if where == "disk":
        where = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
        where |= {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(4)}
    loaded = HopeForCausalLM.from_pretrained(tmp_path, device_map=where, offload_folder=tmp_path / "offload")
    if where != "auto":
        assert loaded.model.layers[1].mixer.o_proj.weight.device.type == "meta"
    ids = random_ids(2, 19)
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    tokens = [m.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0) for m in (loaded, model)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("kind", STATES)
def test_offloaded_weights_give_the_same_text(tiny_model, tmp_path, kind):
    """accelerate's hooks send all that a call gets, the cache as well, to the device `None`."""
    ids = random_ids(2, 12)
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    model = tiny_model(**STATES[kind])
    logits, tokens, loss = model(ids).logits, model.generate(ids, **options), model(ids, labels=ids).loss
    to_cpu, to_disk = tiny_model(**STATES[kind]), tiny_model(**STATES[kind])
    cpu_offload(to_cpu, execution_device="cpu")
    disk_offload(to_disk, tmp_path, execution_device="cpu")
    for offloaded in (to_cpu, to_disk):
        assert offloaded.lm_head.weight.device.type == "meta"
        with torch.no_grad():
            assert torch.equal(offloaded(ids).logits, logits)
            torch.testing.assert_close(offloaded(ids, labels=ids, skip_logits=True).loss, loss)
        assert torch.equal(offloaded.generate(ids, **options), tokens)
        assert torch.equal(offloaded.generate(ids, **options, cache=HopeCache(model.config)), tokens)


def test_a_model_is_made_without_memory_and_filled_later(tiny_model):
    model = tiny_model(**MIXED)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config)
    assert {weight.device.type for weight in empty.parameters()} == {"meta"}
    empty.load_state_dict(model.state_dict(), assign=True)
    # a buffer that is computed and not saved
    empty.model.rotary_emb = copy.deepcopy(model.model.rotary_emb)
    ids = random_ids(2, 19)
    assert torch.equal(empty.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_grows_and_shrinks(tiny_model, tmp_path, tied):
    model = tiny_model(tie_word_embeddings=tied)
    ids = random_ids(2, 19) % 60
    expected = model(ids).logits
    for size in (70, 60):
        model.resize_token_embeddings(size)
        logits = model(ids).logits
        assert logits.shape[-1] == size == model.config.vocab_size
        torch.testing.assert_close(logits[..., :60], expected[..., :60], rtol=0, atol=1e-6)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        # the head that makes the loss without the logits of all tokens
        assert type(model.lm_head) is HopeHead
        loss = model(ids, labels=ids, skip_logits=True).loss
        torch.testing.assert_close(loss, model(ids, labels=ids).loss, rtol=0, atol=1e-6)
    model.save_pretrained(tmp_path)
    assert torch.equal(HopeForCausalLM.from_pretrained(tmp_path)(ids).logits, logits)


@pytest.mark.parametrize(
    ("auto", "shape"),
    [
        (AutoModelForSequenceClassification, (2, 3)),
        (AutoModelForTokenClassification, (2, 19, 3)),
        (AutoModelForQuestionAnswering, (2, 19)),
    ],
)
def test_heads_are_put_on_a_language_model(tiny_model, tmp_path, auto, shape):
    model = tiny_model(pad_token_id=63)
    model.save_pretrained(tmp_path)
    loaded = auto.from_pretrained(tmp_path, num_labels=3).eval()
    for name, weight in model.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name
    ids = random_ids(2, 19) % 63
    logits = loaded(ids)[0]
    assert logits.shape == shape
    loaded.save_pretrained(tmp_path / "head")
    assert torch.equal(auto.from_pretrained(tmp_path / "head").eval()(ids)[0], logits)


def test_the_last_token_that_is_not_padding_classifies(tiny_model, tmp_path):
    tiny_model(pad_token_id=63).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3).eval()
    ids = random_ids(1, 12) % 63
    padding = torch.full((1, 5), 63)
    mask, none = torch.ones_like(ids), torch.zeros_like(padding)
    expected = model(ids).logits
    right = model(torch.cat([ids, padding], 1), attention_mask=torch.cat([mask, none], 1)).logits
    left = model(torch.cat([padding, ids], 1), attention_mask=torch.cat([none, mask], 1)).logits
    torch.testing.assert_close(right, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(left, expected, rtol=0, atol=1e-5)
