"""What a conversation leaves on disk: the cache's file, and the messages beside it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel

from hope_hf import HopeCache
from hope_hf.common.files import read_object, read_small, replace_text, write_errors
from hope_hf.common.folder_lock import LOCK_FILE, FolderLock
from hope_hf.common.process import warn_once

from .conversation import Conversation, Transcript

CHAT_FILE = "chat.json"
# Of the messages that are kept: those that chat templates know.
ROLES = ("user", "assistant", "system", "tool")
_SCRATCH = ".saving-"


class Memory:
    """The folder of `--memory`, which one process at a time may use.

    Attributes:
        folder: where it is saved; another one after a program that does not ask for the lock has written there.
    """

    def __init__(self, folder: str, dtype: str):
        """`dtype` is that of what levels learned, in the file."""
        self.folder = Path(folder)
        self._dtype = dtype
        # of the cache's file that this process has read or written
        self._checksum: str | None = None

    @contextmanager
    def locked(self) -> Iterator["Memory"]:
        """Inside, no other program reads or writes the folder.

        Raises:
            ValueError: another one has it, or it cannot be written.
        """
        lock = FolderLock(self.folder, "--memory")
        lock.acquire()
        try:
            yield self
        finally:
            lock.release()

    def load(self, model: PreTrainedModel) -> tuple[HopeCache | None, Transcript]:
        """The cache and the conversation of the folder; nothing if it is new or empty.

        A cache that another program has written goes on with a new conversation.

        Raises:
            ValueError: the folder holds other files, another model's cache, several sequences, or a damaged file.
        """
        if all(file.name == LOCK_FILE or file.name.startswith(_SCRATCH) for file in self.folder.iterdir()):
            return None, Transcript()
        try:
            self._checksum = HopeCache.checksum_in(self.folder)
            cache = HopeCache.from_pretrained(self.folder, model)
        except ValueError as error:
            raise ValueError(f"--memory {error}.") from None
        if cache.num_sequences > 1:
            raise ValueError(
                f"--memory {self.folder} holds {cache.num_sequences} sequences, and a conversation has one: name "
                "another folder."
            )
        file = self.folder / CHAT_FILE
        if not file.exists():
            return cache, Transcript(begins=cache.get_seq_length())
        fix = "remove the file to begin a new conversation with what was read"
        content = read_object(file, "--memory: the file", fix)
        if not _is_conversation(content, model.config.vocab_size):
            raise ValueError(f"--memory: the file {file} holds no conversation of this model: {fix}.")
        if content["tokens"] != cache.get_seq_length():
            # the cache was written later, by another program
            return cache, Transcript(begins=cache.get_seq_length())
        return cache, Transcript(
            unread=tuple(content["unread"]),
            messages=tuple(content["messages"]),
            text=content["text"],
            # files of before do not say where the conversation began
            begins=content.get("begins", content["tokens"]),
        )

    def save(self, conversation: Conversation) -> int:
        """Write what was read, learned and said; returns the bytes of the files.

        Both files are written before one is replaced.

        Raises:
            ValueError: nothing was read, a value is not finite, or the folder cannot be written.
        """
        cache = conversation.cache
        content = {"tokens": cache.get_seq_length(), **conversation.transcript._asdict()}
        with write_errors(f"--memory {self.folder}"):
            if HopeCache.checksum_in(self.folder) != self._checksum:
                self._move()
            with TemporaryDirectory(dir=self.folder, prefix=_SCRATCH) as name:
                scratch = Path(name)
                cache.save_pretrained(scratch, conversation.model, level_dtype=self._dtype)
                replace_text(scratch / CHAT_FILE, json.dumps(content, ensure_ascii=False, indent=1) + "\n")
                size = sum(file.stat().st_size for file in scratch.iterdir())
                self._replace(scratch)
            self._checksum = HopeCache.checksum_in(self.folder)
        return size

    def _move(self) -> None:
        """Save beside the folder from now on: it holds what this process has not read."""
        others = self.folder
        number = 2
        while others.with_name(f"{others.name}-{number}").exists():
            number += 1
        self.folder = others.with_name(f"{others.name}-{number}")
        self.folder.mkdir(parents=True)
        warn_once(f"--memory {others} was written by another program meanwhile and stays: see {self.folder}.")

    def _replace(self, scratch: Path) -> None:
        """Move both files into place, or none."""
        chat = self.folder / CHAT_FILE
        before = read_small(chat) if chat.exists() else None
        (scratch / CHAT_FILE).replace(chat)
        (cache,) = scratch.iterdir()
        try:
            cache.replace(self.folder / cache.name)
        except OSError:
            if before is None:
                chat.unlink()
            else:
                replace_text(chat, before)
            raise


def _is_conversation(content: dict, vocab_size: int) -> bool:
    """Whether this is the content of a CHAT_FILE."""
    names = {"tokens", *Transcript._fields}
    if content.keys() not in (names, names - {"begins"}):
        return False
    unread, messages = content["unread"], content["messages"]
    if not isinstance(unread, list) or not isinstance(messages, list) or not isinstance(content["text"], str):
        return False
    if not all(_is_count(token) and token < vocab_size for token in unread):
        return False
    if not _is_count(content["tokens"]) or not _is_count(content.get("begins", 0)):
        return False
    return all(map(_is_message, messages))


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


def _is_message(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"role", "content"}:
        return False
    return isinstance(value["content"], str) and value["role"] in ROLES
