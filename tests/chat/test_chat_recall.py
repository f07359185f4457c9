"""`--recall`: passages of what was read before a conversation, which are read before a message and do not stay."""

import json

import pytest
import torch
from tokenizers import decoders

from hope_hf.chat import conversation as module
from hope_hf.chat.reading import read_text
from hope_hf.model.archive import BEGINS

# Two passages, of which the first one alone has w10, and the end alone w58.
TEXT = " ".join(["w10 w11 w12", *["w20 w21 w22 w23"] * 24, "w57 w58"])
TEMPLATES = ["template", "no template"]


@pytest.fixture
def tokenizer(tokenizer):
    """Texts of tokens have spaces between the words."""
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    return tokenizer


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def found_by(conversation, message: str) -> str:
    """The passages that were read before a message."""
    conversation.say(message)
    return " ".join(passage.text for passage in conversation.sources)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("learn", [False, True])
def test_passages_do_not_stay(conversation, tokenizer, model, template, learn):
    """The state is that of a conversation which has read message and answer alone."""
    if template == "no template":
        tokenizer.chat_template = None
    recalls = conversation(recall=True, learn=learn, learn_generated=learn)
    read_text(recalls, "book", TEXT)
    tokens_before = recalls.cache.get_seq_length()
    unread = list(recalls.transcript.unread)
    by_hand = conversation(learn=learn)
    read_text(by_hand, "book", TEXT)
    _, ids = by_hand._continued("w10")
    answer = recalls.say("w10")
    assert recalls.sources and "w10" in recalls.sources[0].text
    # the conversation is a document of its own
    begin, *later = recalls.cache.archive.tokens[0, tokens_before:].tolist()
    new = [begin - BEGINS, *later]
    assert new[: len(ids)] == unread + ids
    assert tokenizer.decode(new[len(ids) :] + list(recalls.transcript.unread), skip_special_tokens=True) == answer
    by_hand._read(ids, learn)
    by_hand._read(new[len(ids) :], learn)
    expected = by_hand.cache.state_tensors()
    for name, tensor in recalls.cache.state_tensors().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_conversation_is_not_searched_and_its_text_stays_whole(conversation):
    recalls = conversation(recall=True)
    assert found_by(recalls, "w58") == ""
    recalls = conversation(recall=True)
    read_text(recalls, "book", TEXT)
    first = found_by(recalls, "w58 w40")
    assert "w58" in first
    # the same words were said meanwhile, behind the text's end
    assert found_by(recalls, "w58 w40") == first
    assert found_by(recalls, "w40") == ""
    recalls.undo()
    assert recalls.sources == []
    recalls.forget()
    assert found_by(recalls, "w58 w40") == first
    # the next file ends the conversation, which was read, too
    read_text(recalls, "book", "w30 w31 w32")
    assert "w40" in found_by(recalls, "w40")
    assert "w31" in found_by(recalls, "w31")


def test_passages_are_of_one_file(conversation):
    """Also of a file that is read again: its best passage is found once."""
    recalls = conversation(recall=True)
    read_text(recalls, "book", TEXT)
    read_text(recalls, "letter", "w30 w31 w32")
    assert found_by(recalls, "w31") == "w30 w31 w32"
    read_text(recalls, "letter", "w30 w31 w32")
    assert found_by(recalls, "w32") == "w30 w31 w32"


def test_an_interrupted_answer_changes_nothing(conversation, monkeypatch):
    recalls = conversation(recall=True)
    read_text(recalls, "book", TEXT)
    before = recalls.cache.state_tensors()
    transcript = recalls.transcript
    for step in ("_generate", "_read"):
        with monkeypatch.context() as patch:

            def interrupt(*args, **options):
                raise KeyboardInterrupt

            patch.setattr(module.Conversation, step, interrupt)
            with pytest.raises(KeyboardInterrupt):
                recalls.say("w10")
        after = recalls.cache.state_tensors()
        assert recalls.transcript == transcript
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_sources_of_the_program(chat, book, tmp_path, folder, tokenizer):
    """A memory is searched in the next run, and one without an archive says so."""
    tokenizer.save_pretrained(folder)
    memory = tmp_path / "memory"
    status, out, _ = chat("--recall", "--file", book, "--memory", memory, typed="w10\n/source\n/undo\n/source\n")
    assert status == 0
    assert "1. tokens 0 to 64: w10 w11 w12" in out and "No passage" in out.splitlines()[-1]
    status, out, _ = chat("--recall", "--memory", memory, typed="w58\n/source\n")
    assert status == 0 and "w57 w58" in out.splitlines()[-1]

    content = json.loads((memory / "chat.json").read_text())
    (memory / "chat.json").write_text(json.dumps(content | {"begins": -1}))
    status, _, errors = chat("--recall", "--memory", memory, typed="w58\n")
    assert status == 2 and "holds no conversation of this model" in errors
    (memory / "chat.json").write_text(json.dumps(content | {"begins": 10**9}))
    assert chat("--recall", "--memory", memory, typed="w58\n")[0] == 0

    status, _, errors = chat("--no_archive", "--memory", memory, typed="w11\n")
    assert status == 0 and "--no_archive drops the words" in errors
    status, out, errors = chat("--recall", "--memory", memory, typed="w10\n/source\n")
    assert status == 0, errors
    assert "does not hold the words" in errors and "No passage" in out
    status, _, errors = chat(typed="/source\n")
    assert status == 2 and "start with --recall" in errors
    status, _, errors = chat("--recall", "--no_archive", typed="w10\n")
    assert status == 2 and "--recall searches" in errors


@pytest.mark.parametrize("window, passages", [(400, 2), (110, 1), (40, 0)])
def test_passages_that_fit_into_the_window(tiny_model, tokenizer, window, passages):
    """Of two the best one is read if the window is short; if not even that fits, one sentence says so."""
    kinds = dict(layer_types=["window_attention"] * 2, sliding_window=window, attention_sinks=2, eos_token_id=62)
    recalls = module.Conversation(tiny_model(**kinds), tokenizer, recall=True, max_new_tokens=2, do_sample=False)
    read_text(recalls, "book", TEXT)
    tokens = recalls.cache.get_seq_length()
    if passages:
        recalls.say("w10 w58")
        assert len(recalls.sources) == passages
        return
    with pytest.raises(ValueError, match="window of the model 40: .* leave --recall out"):
        recalls.say("w10 w58")
    assert recalls.cache.get_seq_length() == tokens
