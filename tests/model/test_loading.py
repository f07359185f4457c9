"""Where the weights of a loaded model lie, and what loading says of a checkpoint that does not fit."""

import pytest
import torch
import torch.nn.functional as F
from accelerate import disk_offload
from mixers import MIXED, random_ids
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hope_hf import HopeCache
from hope_hf.model.loss import HopeHead


def test_offloaded_weights_give_the_same_text(tiny_model, tmp_path):
    """accelerate's hooks send all that a call gets, the cache as well, to the device `None`."""
    ids = random_ids(2, 12)
    options = dict(max_new_tokens=4, do_sample=False, pad_token_id=0)
    model, offloaded = tiny_model(**MIXED), tiny_model(**MIXED)
    disk_offload(offloaded, tmp_path, execution_device="cpu")
    assert offloaded.lm_head.weight.device.type == "meta"
    with torch.no_grad():
        loss = offloaded(ids, labels=ids, skip_logits=True).loss
        torch.testing.assert_close(loss, model(ids, labels=ids).loss)
    tokens = model.generate(ids, **options)
    assert torch.equal(offloaded.generate(ids, **options), tokens)
    assert torch.equal(offloaded.generate(ids, **options, cache=HopeCache(model.config)), tokens)


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_grows_and_shrinks(tiny_model, tied):
    model = tiny_model(tie_word_embeddings=tied)
    ids = random_ids(2, 19) % 60
    expected = model(ids).logits[..., :60]
    for size in (70, 60):
        model.resize_token_embeddings(size)
        out = model(ids, labels=ids)
        assert out.logits.shape[-1] == size == model.config.vocab_size
        torch.testing.assert_close(out.logits[..., :60], expected, rtol=0, atol=1e-6)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        # the head that makes the loss without the logits of all tokens
        assert type(model.lm_head) is HopeHead
        torch.testing.assert_close(model(ids, labels=ids, skip_logits=True).loss, out.loss, rtol=0, atol=1e-6)


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
    expected = model(ids).logits
    for padding in ((5, 0), (0, 5)):
        mask = F.pad(torch.ones_like(ids), padding)
        found = model(F.pad(ids, padding, value=63), attention_mask=mask).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
