"""Chats through the tokenizer's chat template to tokens, of which only the assistant's are learned.

A chat is a list of messages, {"role": "user", "content": "..."}, as `datasets` and TRL have it in a column `messages`,
or {"from": "human", "value": "..."}, as ShareGPT has it in `conversations`. Until it is encoded it is a text: its JSON
in the first form.
"""

import json
import re
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from hope_hf.cli.process import one_line, warn_once

from .encoding import Encode

# What a column of chats is called; the first that is there is read.
COLUMNS = ("messages", "conversations")
ASSISTANT = "assistant"
# ShareGPT's names of those roles that are named otherwise.
_ROLES = {"human": "user", "gpt": ASSISTANT}
# What `transformers` looks for before it returns the mask of the assistant's tokens.
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: "
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""For a tokenizer without a chat template: a line `Role: content` for each message, the assistant's with EOS."""


def chat_text(value: object) -> str | None:
    """A chat as text; None if it is none, or no message is the assistant's."""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return None
    messages = [_message(message) for message in value]
    roles = [message.get("role") for message in messages]
    return json.dumps(messages) if ASSISTANT in roles and all(isinstance(role, str) for role in roles) else None


def _message(message: dict) -> dict:
    """A message with `role` and `content`, whichever of the two forms it has."""
    if isinstance(message.get("from"), str) and message.get("role") is None:
        return {"role": _ROLES.get(message["from"], message["from"]), "content": message.get("value")}
    return message


def choose_chat_column(names: Collection[str], source: str, column: str | None = None) -> str:
    """The column of chats: `column`, or the first of `COLUMNS` among `names`; ValueError naming `source` if none."""
    wanted = COLUMNS if column is None else (column,)
    for name in wanted:
        if name in names:
            return name
    among = ", ".join(sorted(names))
    raise ValueError(
        f"{source} has no column {wanted[0]!r} of chats among {among}: name one with {column_option(source)}."
    )


def column_option(source: str) -> str:
    """What names a column of `source`: a flag for files and data sets of flags, a key for those of a mixture."""
    return "--text_column" if source.startswith("--") else "text_column"


def set_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Give the tokenizer `PLAIN_TEMPLATE`, with a warning, if it has no chat template."""
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
        warn_once(
            "The tokenizer has no chat template: lines 'User: ...' and 'Assistant: ...' are used and saved with the "
            "model. For another template put chat_template.jinja into the tokenizer's folder."
        )


def make_chat_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from chats as text to token lists: `id` for the assistant's tokens, `~id` for all others.

    The template puts tokens before and after a chat, nothing is added. The function raises ValueError if the template
    fails, or does not show which tokens are the assistant's.
    """
    find = _marked if _MARKS.search(tokenizer.get_chat_template()) else _compared

    def encode(texts: Sequence[str | None]) -> list[list[int]]:
        chats = (json.loads(text) for text in texts if text)
        return [
            [token if learned else ~token for token, learned in zip(*find(tokenizer, chat), strict=True)]
            for chat in chats
        ]

    return encode


def chats_as_text(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[str]:
    """Chats filled into the chat template, as documents: without the BOS token that every document gets anyway."""
    start = tokenizer.bos_token or ""
    return [_filled(tokenizer, json.loads(text), tokenize=False).removeprefix(start) for text in texts]


def _marked(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> tuple[list[int], list[int]]:
    """Token ids, and for each whether it lies between the template's marks `generation`."""
    filled = _filled(tokenizer, messages, return_assistant_tokens_mask=True)
    return filled["input_ids"], filled["assistant_masks"]


def _compared(tokenizer: PreTrainedTokenizerBase, messages: list[dict]) -> tuple[list[int], list[bool]]:
    """The same for a template without marks: what a turn of the assistant adds to the turns before it."""
    whole = _filled(tokenizer, messages)["input_ids"]
    learned = [False] * len(whole)
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before = _filled(tokenizer, messages[:index], add_generation_prompt=True)["input_ids"] if index else []
        after = _filled(tokenizer, messages[: index + 1])["input_ids"]
        if whole[: len(after)] != after or after[: len(before)] != before:
            raise ValueError(
                "--assistant_only_loss: the tokenizer's chat template writes a turn anew when others follow, and has "
                "no marks {% generation %} around what the assistant says: add them to its chat_template.jinja."
            )
        learned[len(before) : len(after)] = [True] * (len(after) - len(before))
    return whole, learned


def _filled(tokenizer: PreTrainedTokenizerBase, messages: list[dict], tokenize: bool = True, **options) -> dict | str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=tokenize, return_dict=tokenize, **options)
    # A template is a program of the model's author, and may raise anything.
    except Exception as error:
        shown = json.dumps(messages)[:80]
        raise ValueError(
            f"--assistant_only_loss: the tokenizer's chat template fails on the chat {shown}: {one_line(error)}"
        ) from error
