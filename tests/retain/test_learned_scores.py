"""What retaining is learned from, against attention as transformers computes it, and how scores are fitted."""

import pytest
import torch

from hope_hf import HopeConfig, HopeForCausalLM
from hope_hf.data.vocabulary import train_tokenizer
from hope_hf.evaluation.recall import kinds as suite_kinds
from hope_hf.retain.fit import FEWEST, TEXTS_OF_CHOICE, apply_scores, fit, read_texts, share_out
from hope_hf.retain.interest import read_with_full_attention
from hope_hf.retain.kinds import KINDS, SYLLABLES
from hope_hf.retain.texts import AskedText, AskedTexts

WINDOW, SINKS, LENGTH = 6, 2, 30
QUESTIONS = [[5, 6, 7], [8, 9, 10, 11, 12]]
PROSE = "\n\n".join(f"Paragraph {number} says that the sea was calm and the wind low." for number in range(80))


def model_with(kind: str, **options) -> HopeForCausalLM:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=32, head_dim=8, num_hidden_layers=2, initializer_range=0.3)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, attention_sinks=SINKS)
    config = HopeConfig(**sizes, **heads, layer_types=[kind, kind], **options)
    return HopeForCausalLM(config).eval()


@pytest.fixture(scope="module")
def windowed() -> HopeForCausalLM:
    return model_with("window_attention", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def text() -> AskedText:
    ids = torch.randint(1, 64, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    return AskedText(ids, QUESTIONS)


def weights_of_questions(text: AskedText) -> list[list[torch.Tensor]]:
    """By layer and question: weights of the text's tokens [heads, question's tokens, text's tokens]."""
    whole = model_with("full_attention", attn_implementation="eager")
    weights = [[], []]
    for question in text.questions:
        ids = torch.cat([text.ids, torch.tensor([question])], dim=1)
        attentions = whole(ids, output_attentions=True).attentions
        for layer in range(2):
            weights[layer].append(attentions[layer][0, :, LENGTH:, :LENGTH])
    return weights


def test_interest_is_the_highest_weight_that_questions_give(windowed, text):
    expected = weights_of_questions(text)
    readings = list(read_with_full_attention(windowed, text, [0, 1]))
    assert [reading.layer for reading in readings] == [0, 1]
    for reading, weights in zip(readings, expected, strict=True):
        highest = torch.stack([of_question.amax(1) for of_question in weights]).amax(0)
        of_heads = highest.unflatten(0, (2, 2)).amax(1)[:, SINKS : LENGTH - WINDOW]
        assert reading.interest.shape == (LENGTH - WINDOW - SINKS, 2)
        assert torch.allclose(reading.interest.T, of_heads, atol=1e-5)


def test_what_questions_lack_is_what_they_read_there(windowed, text):
    """By hand: the same values under weights without the passed tokens, whose sum is 1 again."""
    (reading,) = read_with_full_attention(windowed, text, [0])
    block = windowed.model.layers[0]
    missing = mixed = 0.0
    for question in text.questions:
        ids = torch.cat([text.ids, torch.tensor([question])], dim=1)
        inputs = block.input_layernorm(windowed.model.embed_tokens(ids))
        values = block.mixer.project(inputs)[2][0].repeat_interleave(2, dim=0)
        whole = model_with("full_attention", attn_implementation="eager")
        weights = whole(ids, output_attentions=True).attentions[0][0, :, LENGTH:]
        others = weights.clone()
        others[:, :, SINKS : LENGTH - WINDOW] = 0
        others = others / others.sum(-1, keepdim=True)
        read, without = (block.mixer.o_proj((w @ values).transpose(0, 1).flatten(1)) for w in (weights, others))
        missing += (read - without).square().sum().item()
        mixed += read.square().sum().item()
    assert reading.lacking == pytest.approx(missing / mixed, rel=1e-4)


def test_layers_that_lack_most_in_the_first_texts_are_read_to_the_end(windowed, text):
    first_texts = [text] * TEXTS_OF_CHOICE
    shares = {reading.layer: reading.lacking for reading in read_with_full_attention(windowed, text, [0, 1])}
    most = max(shares, key=shares.get)
    other = text._replace(questions=[[9, 9, 9]])
    readings = read_texts(windowed, [*first_texts, other], candidates=[0, 1], count=1)
    assert list(readings) == [most]
    assert len(readings[most].inputs) == TEXTS_OF_CHOICE + 1
    assert list(read_texts(windowed, [text], candidates=[0, 1], count=2)) == [0, 1]


def test_scores_find_the_tokens_of_interest():
    """Those in which one input is large are looked up, by the second head alone."""
    torch.manual_seed(0)
    inputs = 20 * torch.randn(20_000, 16)
    interest = torch.stack([torch.full((20_000,), 1e-4), (inputs[:, 3] > 30) * 0.8], dim=1)
    scores = fit(inputs.half(), interest)
    others = 20 * torch.randn(4000, 16)
    first_head, second_head = apply_scores(scores, others).T
    is_looked_up = others[:, 3] > 30
    highest = second_head[~is_looked_up].quantile(0.99)
    assert (second_head[is_looked_up] > highest).float().mean() > 0.95
    assert first_head.max() < highest


def test_heads_share_out_what_they_retain():
    # two texts of 100 tokens: all of the first head's scores are above all others, and half of the second's
    first = torch.full((200,), 5.0)
    second = torch.cat([torch.full((100,), 3.0), torch.full((100,), -3.0)])
    third = torch.full((200,), -5.0)
    counts = share_out(torch.stack([first, second, third], dim=1), texts=2, mean=50)
    assert counts == [100, 50, FEWEST]
    assert share_out(torch.randn(200, 3), texts=2, mean=10**6) == [100, 100, 100]


def test_texts_state_facts_and_ask_for_them():
    tokenizer = train_tokenizer([PROSE], 300)
    texts = AskedTexts(tokenizer, PROSE, 4096, seed=0)
    text = texts.make()
    assert text.ids.shape == (1, 4096)
    words = tokenizer.decode(text.ids[0])
    assert len(text.questions) in (10, 20, 30, 40, 50)
    # names of two or three syllables, one of which each question has
    names = [name for name in words.split() if name.lower().startswith(tuple(SYLLABLES))]
    for question in text.questions:
        asked = tokenizer.decode(question)
        assert any(name.strip(".,'") in asked for name in names), asked
    # the same seed gives the same texts
    again = AskedTexts(tokenizer, PROSE, 4096, seed=0).make()
    assert torch.equal(again.ids, text.ids) and again.questions == text.questions


def test_no_fact_is_one_of_the_recall_suite():
    theirs = {wording.lower() for kind in suite_kinds.KINDS for wording in (*kind.wordings, kind.question)}
    answers = {str(answer).lower() for kind in suite_kinds.KINDS for answer in kind.answers}
    for kind in KINDS:
        assert not theirs & {wording.lower() for wording in (*kind.wordings, kind.question)}
        assert not answers & {answer.lower() for answer in kind.answers}
