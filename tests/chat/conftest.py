"""A tiny model that learns, as a folder and as a conversation, and the program on piped lines."""

import io
import sys
from functools import partial

import pytest

from hope_hf.chat import generate, main
from hope_hf.chat.conversation import Conversation

# What a template must do so that the text read so far begins every later one, and one without a generation prompt.
KEEPS = (
    "{% for m in messages %}{{ 'w3 ' if m['role'] == 'user' else 'w4 ' }}{{ m['content'] }} w5 {% endfor %}"
    "{% if add_generation_prompt %}w4 {% endif %}"
)


@pytest.fixture
def model(tiny_model):
    """Memories in one layer, softmax attention in the other; levels take a step every 8 tokens."""
    learning = {"periods": [8], "rate": 0.5, "drift": 1.0, "blocks": [0, 1], "gate": False}
    levels = {"level_periods": [1], "level_intermediate_sizes": [24], "level_learning": learning}
    kinds = ["hope_memory", "full_attention"]
    return tiny_model(layer_types=kinds, max_position_embeddings=400, eos_token_id=62, **levels)


@pytest.fixture
def tokenizer(word_tokenizer):
    word_tokenizer.chat_template = KEEPS
    return word_tokenizer


@pytest.fixture
def conversation(model, tokenizer):
    """Build a conversation of greedy answers of 6 tokens."""

    def build(**options) -> Conversation:
        return Conversation(model, tokenizer, **{"max_new_tokens": 6, "do_sample": False, **options})

    return build


@pytest.fixture
def folder(model, tokenizer, tmp_path):
    """The model and its tokenizer in a folder."""
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def started(folder, monkeypatch, capsys):
    """Run a program on typed lines; returns its status, standard output and standard error."""

    def run(program, *words, typed: str = "", model=folder) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
        status = program([str(model), *map(str, words), "--max_new_tokens", "6", "--cpu_threads", "1"])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def chat(started):
    """`hope-hf chat` as `started` runs it."""
    return partial(started, main)


@pytest.fixture
def complete(started):
    """`hope-hf generate` as `started` runs it."""
    return partial(started, generate)
