"""The conversation itself: what the model reads, what is taken back, and what the levels learn."""

import pytest
import torch

from hope_hf import HopeCache
from hope_hf.chat.conversation import Conversation

MESSAGES = ["w10 w11 w12", "w20", "w30 w31 w32 w33 w34 w35 w36 w37"]
REWRITES = "{% for message in messages %}w1 {{ message['content'] }} {% endfor %}w2"


def same(one: HopeCache, other: HopeCache) -> bool:
    """Whether two caches hold the same bits."""
    tensors, others = one.state_tensors(), other.state_tensors()
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


def bytes_of(model) -> list[bytes]:
    return [weight.detach().numpy().tobytes() for weight in model.state_dict().values()]


@pytest.fixture
def tokens_read(model):
    """Every token that the model has read, in order."""
    read = []
    handle = model.model.embed_tokens.register_forward_hook(lambda _, ids, __: read.extend(ids[0][0].tolist()))
    yield read
    handle.remove()


@pytest.mark.parametrize("template", ["keeps", "rewrites", None])
def test_a_conversation_equals_the_same_tokens_read_in_one_go(conversation, model, tokenizer, template, tokens_read):
    if template != "keeps":
        tokenizer.chat_template = template and REWRITES
    talk = conversation()
    for message in MESSAGES:
        talk.say(message)
    read = list(tokens_read)
    cache = HopeCache(model.config)
    ahead = torch.tensor([[7, 8]])
    with torch.no_grad():
        model(torch.tensor([read]), cache=cache)
        expected = model(ahead, cache=cache).logits
        torch.testing.assert_close(model(ahead, cache=talk.cache).logits, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("template", [True, False])
def test_messages_and_files_are_text_whatever_they_spell(conversation, tokenizer, tokens_read, template):
    """The word tokenizer reads `<eos>` as a token, 62, and as text as three unknown words, 0."""
    if not template:
        tokenizer.chat_template = None
    talk = conversation()
    assert talk.encode("w10 <eos>") == [10, 0, 0, 0]
    talk.say("w10 <eos> w11")
    begin, end = ([3], [5, 4]) if template else ([], [])
    expected = [*begin, 10, 0, 0, 0, 11, *end]
    assert tokens_read[: len(expected)] == expected
    (unread,) = talk.transcript.unread
    tokens_read.clear()
    talk.say("<eos>")
    # What was said goes on to be the beginning of the filled template.
    expected = [unread, *([5, 3, 0, 0, 0, 5, 4] if template else [0, 0, 0])]
    assert tokens_read[: len(expected)] == expected


def test_a_prompt_of_generate_is_read_as_transformers_reads_it(conversation, tokens_read):
    conversation().complete("w10 <eos> w11")
    assert tokens_read[:3] == [10, 62, 11]


@pytest.mark.parametrize("learn", [False, True])
def test_undo_is_exact(tiny_model, tokenizer, learn):
    kinds = ["hope_memory", "full_attention", "window_attention", "sparse_attention", "retaining_attention"]
    windows = dict(sliding_window=4, retained_block_size=4)
    learning = {"periods": [8, 8], "gate": False}
    model = tiny_model(num_hidden_layers=5, layer_types=kinds, level_learning=learning, **windows)
    talk = Conversation(model, tokenizer, learn=learn, learn_generated=learn, max_new_tokens=6, do_sample=False)
    talk.say(MESSAGES[2])
    transcript = talk.transcript
    reference = HopeCache.from_state_tensors(model.config, talk.cache.state_tensors())
    answer = talk.say(MESSAGES[1])
    assert not same(talk.cache, reference)
    talk.undo()
    assert same(talk.cache, reference) and talk.transcript == transcript
    assert talk.say(MESSAGES[1]) == answer
    talk.undo()
    with pytest.raises(ValueError, match="nothing to undo"):
        talk.undo()


def test_forgetting_drops_what_was_learned_and_can_be_undone(conversation):
    talk = conversation(learn=True)
    talk.say(MESSAGES[2])
    learned, tokens = talk.cache.levels, talk.cache.get_seq_length()
    assert talk.forget() == learned.nbytes
    assert talk.cache.levels is None and talk.cache.get_seq_length() == tokens
    talk.undo()
    assert talk.cache.levels is learned


def test_levels_learn_from_what_was_asked_and_weights_keep_their_bytes(conversation, model):
    before, tokens = bytes_of(model), {}
    for learn, generated in ((False, False), (True, False), (True, True)):
        talk = conversation(learn=learn, learn_generated=generated)
        for message in MESSAGES:
            talk.say(message)
        levels = talk.cache.levels
        tokens[learn, generated] = 0 if levels is None else int(levels.tokens)
        if learn:
            assert all(bool(delta.any()) for delta in levels.deltas.values())
    # answers have 6 tokens, and the last one is read with the next message
    assert tokens[True, True] == tokens[True, False] + 5 * len(MESSAGES)
    assert tokens[False, False] == 0 and bytes_of(model) == before


@pytest.mark.parametrize("failing", ["positions", "template", "interrupt"])
def test_a_turn_that_fails_changes_nothing(conversation, tokenizer, monkeypatch, failing):
    talk = conversation(learn=True)
    talk.say(MESSAGES[0])
    before, transcript, message = talk.cache.snapshot(), talk.transcript, MESSAGES[2]
    if failing == "positions":
        message = "w1 " * 400
    elif failing == "template":
        tokenizer.chat_template = "{{ raise_exception('no such role') }}"
    else:
        monkeypatch.setattr("hope_hf.chat.conversation.TextStreamer.end", interrupted)
    with pytest.raises(KeyboardInterrupt if failing == "interrupt" else ValueError, match="400 positions|no such|"):
        talk.say(message)
    reference = HopeCache(talk.model.config).rollback(before)
    assert same(talk.cache, reference) and talk.transcript == transcript


def interrupted(streamer):
    raise KeyboardInterrupt


def test_the_last_positions_are_used(conversation):
    talk = conversation(max_new_tokens=400)
    talk.say("w10 " * 300)
    assert talk.cache.get_seq_length() + len(talk.transcript.unread) <= 400
    with pytest.raises(ValueError, match="400 positions"):
        talk.say("w10 " * 400)


def test_a_state_of_constant_size_has_no_last_position(tiny_model, tokenizer):
    model = tiny_model(max_position_embeddings=8, layer_types=["hope_memory", "window_attention"], sliding_window=4)
    talk = Conversation(model, tokenizer, max_new_tokens=6)
    talk.say("w10 " * 20)
    assert not talk.grows and talk.cache.get_seq_length() > 8
