"""A tokenizer's chat template: what it writes itself are marks, and the messages are text, whatever they spell.

A special token that a message spells is broken by characters before the template is filled. What is whole in the
filled template are the template's own marks, and stands for the special tokens. All else becomes the tokens of plain
text, as in training on texts.
"""

import copy
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from hope_hf.common.process import one_line, warn_once

from .encoding import plain_ids

ASSISTANT = "assistant"
# Unicode leaves these to programs: no text has them. The first breaks what a message spells, the second begins and
# ends the name of a mark.
_BREAK, _MARK = "\ufdd0", "\ufdd1"
_OURS = dict.fromkeys(map(ord, (_BREAK, _MARK)))
# What `transformers` looks for before it returns the places of the assistant's words.
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}{{ eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""For a tokenizer without a chat template: a line `Role: content` for each message, the assistant's with EOS."""


class Chat(NamedTuple):
    """Messages with `role` and `content`, and the tools that they may call, as JSON schemas."""

    messages: list[dict]
    tools: list[dict] | None = None


class Filled(NamedTuple):
    """A filled template, in which what messages spell is broken, and the places (begin, end) of what is learned."""

    text: str
    learned: Sequence[tuple[int, int]] = ()


class ChatTemplate:
    """The chat template of a tokenizer. A copy in another process encodes alike."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self.tokenizer = tokenizer
        added_tokens = tokenizer.added_tokens_decoder
        self._special = {token.content: index for index, token in added_tokens.items() if token.special}
        longest_first = sorted(self._special, key=len, reverse=True)
        self._spelled = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._backend = None
        # By the backend's id of a mark, the tokenizer's id of the special token.
        self._ids = {}
        if getattr(tokenizer, "backend_tokenizer", None) is not None:
            self._backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self._backend.no_truncation()
            self._backend.no_padding()
            _fill_gaps(self._backend)
            for index in self._special.values():
                # An own token for each mark, since those of the tokenizer are text to `encode_special_tokens`.
                self._backend.add_tokens([_mark(index, added_tokens[index])])
                self._ids[self._backend.token_to_id(_name(index))] = index

    @property
    def source(self) -> str:
        """The template's own text."""
        return self.tokenizer.get_chat_template()

    def fill(self, chat: Chat, **options) -> str:
        """The filled template, as `tokens` and `without_breaks` read it; ValueError with the reason if it fails.

        options: of `apply_chat_template`.
        """
        try:
            return self.tokenizer.apply_chat_template(*self._broken(chat), tokenize=False, **options)
        # A template is a program of the model's author, and may raise anything.
        except Exception as error:
            raise ValueError(one_line(error)) from error

    def filled(self, chat: Chat) -> Filled:
        """The filled template with the assistant's turns, of which those of `weight` 0 are left out.

        Raises ValueError with the reason if the template fails, or does not show the turns.
        """
        return self._marked(chat) if _GENERATION.search(self.source) else self._compared(chat)

    def writes(self, chat: Chat, index: int, keys: Sequence[str]) -> bool:
        """Whether the filled template has something of these keys of a message."""
        without = {key: value for key, value in chat.messages[index].items() if key not in keys}
        messages = [*chat.messages[:index], without, *chat.messages[index + 1 :]]
        return self._differs(chat, Chat(messages, chat.tools))

    def writes_tools(self, chat: Chat) -> bool:
        """Whether the filled template has something of the tools."""
        return self._differs(chat, Chat(chat.messages))

    def tokens(self, filled: Filled) -> tuple[list[int], list[bool]]:
        """Token ids, and which of them are learned."""
        if self._backend is None:
            return self._tokens_of_parts(filled)
        # Not kept by a copy in another process.
        self._backend.encode_special_tokens = True
        encoding = self._backend.encode(self._named(filled.text), add_special_tokens=False)
        learned = [False] * len(encoding.ids)
        for begin, end in filled.learned:
            # The same places in the text that the backend reads.
            begin = len(self._named(filled.text[:begin]))
            end = len(self._named(filled.text[:end]))
            inside = []
            for index, (first, last) in enumerate(encoding.offsets):
                if first < end and last > begin:
                    inside.append(index)
            if inside:
                for index in range(inside[0], inside[-1] + 1):
                    learned[index] = True
        return [self._ids.get(index, index) for index in encoding.ids], learned

    def encode(self, text: str) -> list[int]:
        """The token ids of a part of what `fill` returns."""
        return self.tokens(Filled(text))[0]

    def _broken(self, chat: Chat) -> tuple[list[dict], list[dict] | None]:
        """The arguments of a template. Keys without a value are left out, as many templates ask for the key alone."""
        messages = []
        for message in chat.messages:
            broken = {}
            for key, value in message.items():
                if value is not None:
                    broken[key] = value if key == "role" else self._break(value)
            messages.append(broken)
        return messages, chat.tools and self._break(chat.tools)

    def _break(self, value: object) -> object:
        if isinstance(value, str):
            # Half of a surrogate pair is not a character.
            text = value.encode(errors="replace").decode().translate(_OURS)
            return self._spelled.sub(lambda found: _BREAK.join(found[0]), text)
        if isinstance(value, list):
            return list(map(self._break, value))
        if isinstance(value, dict):
            return {self._break(key): self._break(part) for key, part in value.items()}
        return value

    def _named(self, text: str) -> str:
        """The text as the backend reads it."""
        return without_breaks(self._spelled.sub(lambda found: _name(self._special[found[0]]), text))

    def _marked(self, chat: Chat) -> Filled:
        """The turns lie between the template's marks `generation`."""
        messages, tools = self._broken(chat)
        template = self.tokenizer.get_chat_template(tools=tools)
        try:
            (text,), (places,) = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except Exception as error:
            raise ValueError(one_line(error)) from error
        turns = [message for message in chat.messages if message["role"] == ASSISTANT]
        if all(map(_is_learned, turns)):
            return Filled(text, places)
        if len(places) != len(turns):
            raise ValueError("a turn has weight 0, and {% generation %} does not surround every turn of the assistant")
        learned = [place for place, turn in zip(places, turns, strict=True) if _is_learned(turn)]
        return Filled(text, learned)

    def _differs(self, chat: Chat, other: Chat) -> bool:
        try:
            return self.fill(chat) != self.fill(other)
        except ValueError:
            # The template asks for what the other lacks.
            return True

    def _compared(self, chat: Chat) -> Filled:
        """A turn is what it adds to the turns before it."""
        whole = self.fill(chat)
        places = []
        for index, message in enumerate(chat.messages):
            if message["role"] != ASSISTANT or not _is_learned(message):
                continue
            earlier = Chat(chat.messages[:index], chat.tools)
            after = self.fill(Chat(chat.messages[: index + 1], chat.tools))
            before = self.fill(earlier, add_generation_prompt=True) if index else self._head(chat, whole, after)
            if not whole.startswith(after) or not after.startswith(before):
                raise ValueError(
                    "it writes a turn anew when others follow, and has no marks {% generation %} around what the "
                    "assistant says: add them to its chat_template.jinja"
                )
            places.append((len(before), len(after)))
        return Filled(whole, places)

    def _head(self, chat: Chat, whole: str, first: str) -> str:
        """What comes before the words of a first turn of the assistant; templates need not fill a chat of no turn."""
        prompt = self.fill(chat, add_generation_prompt=True).removeprefix(whole)
        return first[: first.find(prompt) + len(prompt)] if prompt in first else ""

    def _tokens_of_parts(self, filled: Filled) -> tuple[list[int], list[bool]]:
        """`tokens` of a tokenizer written in Python, which itself splits texts at special tokens."""
        ids = []
        learned = []
        marks = [match.span() for match in self._spelled.finditer(filled.text)]
        edges = {0, len(filled.text)}
        for place in (*marks, *filled.learned):
            edges.update(place)
        for begin, end in pairwise(sorted(edges)):
            part = filled.text[begin:end]
            if (begin, end) in marks:
                part_ids = [self._special[part]]
            else:
                part_ids = plain_ids(self.tokenizer, without_breaks(part))
            ids += part_ids
            is_learned = any(first <= begin < last for first, last in filled.learned)
            learned += [is_learned] * len(part_ids)
        return ids, learned


def without_breaks(text: str) -> str:
    """A filled template as people read it."""
    return text.replace(_BREAK, "")


def set_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer `PLAIN_TEMPLATE`, with a warning, if it has no chat template."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
        warn_once(
            "The tokenizer has no chat template: lines 'User: ...' and 'Assistant: ...' are used and saved with the "
            "model. For another template put chat_template.jinja into the tokenizer's folder."
        )


def chat_of(text: str) -> Chat:
    """The chat of a text that `chats.chat_text` made."""
    content = json.loads(text)
    return Chat(content) if isinstance(content, list) else Chat(content["messages"], content["tools"])


def _is_learned(message: dict) -> bool:
    return message.get("weight") != 0


def _fill_gaps(backend: Tokenizer) -> None:
    """Add tokens that no text has: the library counts entries for the next id, which may be one behind a gap."""
    vocabulary = backend.get_vocab()
    missing = max(vocabulary.values()) + 1 - len(vocabulary)
    backend.add_tokens([_name(-number) for number in range(1, missing + 1)])


def _name(index: int) -> str:
    """What stands for the mark of a special token."""
    return f"{_MARK}{index}{_MARK}"


def _mark(index: int, token: AddedToken) -> AddedToken:
    """The token of a mark, which takes in the spaces that the special token takes in."""
    return AddedToken(
        _name(index),
        special=False,
        normalized=False,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        single_word=token.single_word,
    )
