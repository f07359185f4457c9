"""What a conversation leaves on disk: the cache's file, and the messages beside it."""

import json
from pathlib import Path

from transformers import PreTrainedModel

from hope_hf import HopeCache
from hope_hf.cli.files import read_object, replace_text, write_errors

from .conversation import Conversation, Place

CHAT_FILE = "chat.json"


def load(folder: str | None, model: PreTrainedModel) -> tuple[HopeCache | None, Place]:
    """The cache and the conversation of a folder; nothing if the folder is new or empty.

    A cache that another program has written goes on with a new conversation.

    Raises:
        ValueError: the folder holds other files, another model's cache, several sequences, or a damaged file.
    """
    path = Path(folder) if folder is not None else None
    if path is None or not path.exists() or not any(path.iterdir()):
        return None, Place()
    try:
        cache = HopeCache.from_pretrained(path, model)
    except ValueError as error:
        raise ValueError(f"--memory {error}.") from None
    rows = cache.num_sequences
    if rows > 1:
        raise ValueError(f"--memory {folder} holds {rows} sequences, and a conversation has one: name another folder.")
    file = path / CHAT_FILE
    if not file.exists():
        return cache, Place()
    fix = "remove the file to begin a new conversation with what was read"
    found = read_object(file, "--memory: the file", fix)
    place = _place(found, model.config.vocab_size)
    if place is None:
        raise ValueError(f"--memory: the file {file} holds no conversation of this model: {fix}.")
    # A cache that was written later, by another program, is not where this conversation stood.
    return cache, place if found["tokens"] == cache.get_seq_length() else Place()


def _place(found: dict, vocabulary: int) -> Place | None:
    """The conversation of a file; `None` if it holds something else."""
    if found.keys() != {"tokens", *Place._fields}:
        return None
    unread, messages, text = (found[name] for name in Place._fields)
    ids = isinstance(unread, list) and all(type(one) is int and 0 <= one < vocabulary for one in unread)
    said = isinstance(messages, list) and all(isinstance(one, dict) and _is_message(one) for one in messages)
    return Place(tuple(unread), tuple(messages), text) if ids and said and isinstance(text, str) else None


def _is_message(message: dict) -> bool:
    return message.keys() == {"role", "content"} and all(isinstance(value, str) for value in message.values())


def save(conversation: Conversation, folder: str, dtype: str) -> int:
    """Write what was read, learned and said; returns the bytes of the files. `dtype` is that of what levels learned.

    Raises:
        ValueError: nothing was read, a value is not finite, or the folder cannot be written.
    """
    path, cache = Path(folder), conversation.cache
    with write_errors(f"--memory {folder}"):
        cache.save_pretrained(path, conversation.model, level_dtype=dtype)
        found = {"tokens": cache.get_seq_length(), **conversation.place._asdict()}
        replace_text(path / CHAT_FILE, json.dumps(found, ensure_ascii=False, indent=1) + "\n")
        return sum(file.stat().st_size for file in path.iterdir())
