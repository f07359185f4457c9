"""A conversation: messages become tokens, and the cache goes on with the new ones alone."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TextStreamer

from hope_hf import HopeCache, Passage, join_passages
from hope_hf.data import Chat, ChatTemplate, plain_ids

# How passages are read before a message, by a table in docs/log/passages.md.
_WITH_PASSAGES = 'Passage:\n"{passages}"\n\nQuestion: {message}'
# More tokens than any window holds.
_LONG = 1 << 30


class Transcript(NamedTuple):
    """Where a conversation stands, besides the state of its cache."""

    # tokens that the cache has not read: `generate` does not read the last token that it returns
    unread: tuple[int, ...] = ()
    # messages since the conversation began, or since a file was read
    messages: tuple[dict[str, str], ...] = ()
    # these messages as the model has read and written them; special tokens that they spell are broken
    text: str = ""
    # columns that the cache had read before them: recall searches these
    begins: int = 0


class Turn(NamedTuple):
    """What a message or a file took."""

    # tokens read and written
    read: int
    written: int
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return (self.read + self.written) / max(self.seconds, 1e-9)

    def __str__(self):
        tokens = f"{self.read:,} read and {self.written:,} written"
        return f"{self.speed:,.1f} tokens per second: {tokens} in {self.seconds:.1f} s"


class Conversation:
    """A model that reads texts and answers messages, with what it has read and learned.

    Attributes:
        cache: what the model has read, and what its levels have learned.
        transcript: what else the next message needs.
        learn: whether levels learn from messages and files, and `learn_generated` also from answers.
        recall: whether passages of what was read before the conversation are read again before a message.
        sources: these passages, of the last answer, the best one first.
        last: what the last message or file took; `None` before the first, and after `undo`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        cache: HopeCache | None = None,
        transcript: Transcript | None = None,
        learn: bool = False,
        learn_generated: bool = False,
        recall: bool = False,
        **options,
    ):
        """`options`: arguments of `generate`, `max_new_tokens` among them."""
        self.model = model
        self.tokenizer = tokenizer
        self.options = options
        self.cache = HopeCache(model.config) if cache is None else cache
        self.transcript = Transcript() if transcript is None else transcript
        self.learn = learn
        self.learn_generated = learn_generated
        self.recall = recall
        self.sources: list[Passage] = []
        self.last: Turn | None = None
        # snapshot of the cache, and transcript, before the last turn
        self._before: tuple | None = None
        ends = model.generation_config.eos_token_id
        if ends is None:
            ends = tokenizer.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]
        self._template = None if tokenizer.chat_template is None else ChatTemplate(tokenizer)
        # what the tokenizer puts before a text: it is read once
        self._start = tokenizer("")["input_ids"]

    @property
    def has_begun(self) -> bool:
        """Whether the model has read anything."""
        return bool(self.cache.get_seq_length())

    @property
    def grows(self) -> bool:
        """Whether the state grows with the text."""
        config = self.model.config
        for mixer in config.mixers:
            if mixer.cache_bytes(config, _LONG) < mixer.cache_bytes(config, 2 * _LONG):
                return True
        return False

    @property
    def state_size(self) -> str:
        """Size of what was read, without what levels have learned, in words."""
        size = sum(tensor.nbytes for tensor in self.cache.state_tensors().values())
        size -= self.cache.level_bytes + self.archive_bytes
        growth = "grows with every token" if self.grows else "constant"
        return f"{size / 1e6:,.1f} MB, {growth}"

    @property
    def archive_bytes(self) -> int:
        """Size of the words of what was read."""
        return sum(tensor.nbytes for tensor in self.cache.archive.named_tensors().values())

    def say(self, message: str) -> str:
        """The answer to a message, which is printed while it is made.

        Raises:
            ValueError: the message has no token, the model has no position left, or its chat template fails. Nothing
                was read.
        """
        text, ids = self._continued(message)
        passages = self._passages(message)
        with self.turn():
            if passages:
                new_ids = self._generate_with_passages(message, ids, passages)
            else:
                new_ids = self._generate(ids, "message", self.learn, self.learn_generated)
            self.sources = passages
            answer = self.tokenizer.decode(new_ids, skip_special_tokens=True)
            text += self.tokenizer.decode(new_ids, skip_special_tokens=False)
            new_messages = ({"role": "user", "content": message}, {"role": "assistant", "content": answer})
            self.transcript = Transcript(
                unread=(new_ids[-1],),
                messages=self.transcript.messages + new_messages,
                text=self.transcript.text + text,
                begins=self.transcript.begins,
            )
        return answer

    def _passages(self, message: str) -> list[Passage]:
        """The passages that are read before a message: none without recall, or if nothing was read or fits."""
        begins = self.transcript.begins
        if not self.recall or not begins:
            return []
        passages = self.cache.recall(message, self.tokenizer, stop=begins)
        window = self.model.config.sliding_window
        # the best one alone is better than no answer
        while window is not None and len(passages) > 1 and len(self._behind(passages, message)) > window:
            passages.pop()
        return passages

    def _behind(self, passages: list[Passage], message: str) -> list[int]:
        """The tokens of a message with passages in front."""
        prompt = _WITH_PASSAGES.format(passages=join_passages(passages).strip(), message=message)
        _, ids = self._continued(prompt)
        return ids

    def _generate_with_passages(self, message: str, ids: list[int], passages: list[Passage]) -> list[int]:
        """The answer to a message, whose tokens are `ids`, after passages, which the cache has not read at the end."""
        before = self.cache.snapshot()
        ids_with_passages = self._behind(passages, message)
        window = self.model.config.sliding_window
        if window is not None and len(ids_with_passages) > window:
            raise ValueError(
                f"the message and its passages have {len(ids_with_passages):,} tokens, and the window of the model "
                f"{window:,}: shorten the message, or leave --recall out."
            )
        new_ids = self._generate(ids_with_passages, "message", learn=False, learn_generated=False)
        self.cache.rollback(before)
        self._read([*self.transcript.unread, *ids], self.learn)
        # `generate` does not read the last token
        self._read(new_ids[:-1], self.learn_generated)
        return new_ids

    @torch.no_grad()
    def _read(self, ids: list[int], learn: bool) -> None:
        """Read tokens without an answer."""
        if ids:
            self.model(self.as_input(ids), cache=self.cache, learn=learn, logits_to_keep=1)

    def complete(self, text: str) -> str:
        """The continuation of a text that follows what was read, without a template; printed while it is made.

        Raises:
            ValueError: the text has no token, or the model has no position left. Nothing was read.
        """
        with self.turn():
            # A prompt is read as transformers reads it: special tokens that it spells are special.
            ids = self.tokenizer(text, add_special_tokens=not self.has_begun, verbose=False)["input_ids"]
            if not text and not ids and not self.transcript.unread:
                raise ValueError("the text is empty: give --prompt TEXT, or pipe one to standard input.")
            new_ids = self._generate(ids, "text", self.learn, self.learn_generated)
            self.transcript = Transcript((new_ids[-1],), begins=self.cache.get_seq_length())
        return self.tokenizer.decode(new_ids, skip_special_tokens=True)

    def _generate(self, ids: list[int], named: str, learn: bool, learn_generated: bool) -> list[int]:
        """The tokens that the model writes after it has read `ids`, within a turn."""
        start = time.perf_counter()
        ids = [*self.transcript.unread, *ids]
        if not ids:
            raise ValueError(f"the {named} has no token of the model: write another one.")
        most = min(self.options["max_new_tokens"], self.room_for(len(ids), least=1))
        tokens = self.as_input(ids)
        output = self.model.generate(
            tokens,
            attention_mask=tokens.new_ones(1, self.cache.get_seq_length() + len(ids)),
            cache=self.cache,
            learn=learn,
            learn_generated=learn_generated,
            streamer=TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True),
            eos_token_id=self._ends,
            pad_token_id=self._ends[0],
            **self.options | {"max_new_tokens": most},
        )
        new_ids = output[0, len(ids) :].tolist()
        self.last = Turn(len(ids), len(new_ids), time.perf_counter() - start)
        return new_ids

    def _continued(self, message: str) -> tuple[str, list[int]]:
        """A message as the model reads it after all before it, and the tokens of this text."""
        if self._template is None:
            text = f"\n{message}" if self.has_begun else message
            return text, self.encode(text)
        messages = [*self.transcript.messages, {"role": "user", "content": message}]
        whole = self._filled(messages)
        if whole.startswith(self.transcript.text):
            text = whole.removeprefix(self.transcript.text)
            return text, self._without_start(self._template.encode(text))
        # The template writes earlier messages anew, and what was read cannot be changed: the message alone follows.
        text = self._filled(messages[-1:])
        ids = self._without_start(self._template.encode(text))
        unread = self.transcript.unread
        if unread and unread[-1] not in self._ends:
            # the answer was cut
            ids = [self._ends[0], *ids]
        return text, ids

    def _filled(self, messages: list[dict]) -> str:
        try:
            return self._template.fill(Chat(messages), add_generation_prompt=True)
        except ValueError as error:
            raise ValueError(f"the model's chat template fails on this message: {error}") from error

    def _without_start(self, ids: list[int]) -> list[int]:
        """Tokens of a filled template without those that the tokenizer puts before texts, if these were read."""
        length = len(self._start)
        return ids[length:] if self.has_begun and ids[:length] == self._start else ids

    def encode(self, text: str) -> list[int]:
        """Tokens of a text that follows what was read; only the first one begins with the tokenizer's own tokens.

        Special tokens that it spells are text.
        """
        return plain_ids(self.tokenizer, text, begins=not self.has_begun)

    def as_input(self, ids: list[int]) -> torch.Tensor:
        """Tokens as the model takes them [1, T]."""
        return torch.tensor([ids], device=self.model.device)

    def room_for(self, tokens: int, least: int = 0) -> float:
        """Positions that are left after `tokens` more; ValueError if they are fewer than `least`."""
        if not self.grows:
            return math.inf
        positions = self.model.config.max_position_embeddings
        taken = self.cache.get_seq_length()
        left = positions - taken - tokens
        if left < least:
            anew = ", begin without what was read before" if taken else ""
            raise ValueError(
                f"the model has {positions:,} positions, {taken:,} of them are taken and {tokens:,} tokens follow: "
                f"shorten the text{anew}, or convert the model with a window."
            )
        return left

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Inside, the conversation takes a turn, which `undo` can take back; an error takes it back at once."""
        snapshot, transcript = self.cache.snapshot(), self.transcript
        try:
            yield
        except BaseException:
            self.cache.rollback(snapshot)
            self.transcript = transcript
            raise
        self._before = snapshot, transcript

    def undo(self) -> None:
        """Return to the state before the last message or file; ValueError if it is not known."""
        if self._before is None:
            raise ValueError("there is nothing to undo: only the last message or file of this session can be undone.")
        snapshot, self.transcript = self._before
        self.cache.rollback(snapshot)
        self._before = self.last = None
        self.sources = []

    def forget(self) -> int:
        """Drop what the levels have learned; returns its bytes. It can be undone."""
        size = self.cache.level_bytes
        self._before = self.cache.snapshot(), self.transcript
        self.cache.reset_levels()
        return size
