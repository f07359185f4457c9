"""Chats as rows of files and data sets have them, as text, and as tokens of which only the assistant's are learned.

A chat is a list of messages, {"role": "user", "content": "..."}, as `datasets` and TRL have it in a column `messages`,
or {"from": "human", "value": "..."}, as ShareGPT has it in `conversations`; a column `tools` lists what it may call.
Until it is encoded it is a text: the JSON of its messages in the first form, or of an object with messages and tools.
"""

import json
from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase

from hope_hf.common.process import warn_once

from .chat_template import ASSISTANT, Chat, ChatTemplate, chat_of, without_breaks
from .encoding import Encode

# What a column of chats is called; the first that is there is read.
COLUMNS = ("messages", "conversations")
TOOLS = "tools"
# Other names of roles: ShareGPT's, and Gemma's `model`.
_ROLES = {"human": "user"} | dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "bot", "model"), ASSISTANT)
# Roles that templates know without naming them; others are a mistake unless the template names them.
_KNOWN = {"user", ASSISTANT, "system", "developer", "tool", "function"}
# Keys that describe a turn, and are nothing that is said in it.
_DESCRIPTIVE = {"role", "weight", "name", "tool_call_id"}
# Keys of what a turn calls, in the present form and in that of before.
_CALLS = ("tool_calls", "function_call")
# Columns in which some data sets have what belongs into the first turn.
_SYSTEM = ("system", "system_prompt")


class BadChat(ValueError):
    """A row holds no chat that can be learned; the message says why, after the row's number."""


def chat_text(value: object, tools: object = None, template: ChatTemplate | None = None) -> str:
    """A chat of a row as text; raises BadChat if it is none, or the template fails on it.

    Args:
        value: the messages.
        tools: a list of JSON schemas, or its JSON.
        template: that is filled with it, to see whether it fails; unless given, the chat's form alone is checked.
    """
    template_text = "" if template is None else template.source
    messages = []
    learned_turns = 0
    if isinstance(value, list) and all(isinstance(message, dict) for message in value):
        for row in value:
            message = _message(row, template_text)
            messages.append(message)
            if message["role"] == ASSISTANT and message.get("weight") != 0:
                learned_turns += 1
    if not learned_turns:
        raise BadChat("has no chat with a turn of the assistant")
    chat = Chat(messages, _tools(tools))
    if template is not None:
        try:
            template.filled(chat)
        except ValueError as error:
            raise BadChat(f"has a chat on which the tokenizer's chat template fails ({error})") from error
        _require_written(chat, template)
    # A table may hold dates and the like beside what is said.
    return json.dumps(chat.messages if chat.tools is None else chat._asdict(), default=str)


def _require_written(chat: Chat, template: ChatTemplate) -> None:
    """BadChat if the template writes nothing of a turn without content, or not what a turn calls."""
    # To fill a template takes time: what it names, it writes.
    named = template.source
    if chat.tools and TOOLS not in named and not template.writes_tools(chat):
        warn_once(f"The tokenizer's chat template writes no {TOOLS}: those of the chats are not learned from.")
    for index, message in enumerate(chat.messages):
        calls = [key for key in _CALLS if message.get(key)]
        if calls and calls[0] in named:
            continue
        keys = calls
        if not calls and message.get("content") is None:
            keys = sorted(key for key in message.keys() - _DESCRIPTIVE if message[key])
        if keys and not template.writes(chat, index, keys):
            raise BadChat(
                f"has a turn of the {message['role']} with {' and '.join(keys)}, of which the tokenizer's chat "
                "template writes nothing"
            )


def _message(message: dict, template: str) -> dict:
    """A message with `role` and `content`, whichever of the two forms it has. `template`: the template's text."""
    if isinstance(message.get("from"), str) and message.get("role") is None:
        message = _of_sharegpt(message)
    role = message.get("role")
    if not isinstance(role, str):
        raise BadChat("has a turn without a role")
    role = _ROLES.get(role, role)
    if role not in _KNOWN and role not in template:
        raise BadChat(f"has a turn of the role {role!r} (known: {', '.join(sorted(_KNOWN))})")
    if message.get("weight", 1) not in (None, 0, 1):
        raise BadChat(f"has a turn of weight {message['weight']!r} (0 and 1 are read)")
    message = message | {"role": role}
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is not None:
        message["content"] = _content(content)
    elif not any(map(message.get, message.keys() - _DESCRIPTIVE)):
        raise BadChat(f"has a turn of the {role} without content")
    if isinstance(calls, list):
        message["tool_calls"] = list(map(_call, calls))
    return message


def _of_sharegpt(message: dict) -> dict:
    """A message {"from": ..., "value": ...} in the other form."""
    result = {"role": message["from"], "content": message.get("value")}
    for key in ("weight", "tool_calls"):
        if message.get(key) is not None:
            result[key] = message[key]
    return result


def _content(content: object) -> str:
    """What is said in a turn, which may be a list of parts."""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        is_typed = isinstance(part, dict)
        text = part.get("text") if is_typed else part
        if not isinstance(text, str):
            kind = part.get("type") if is_typed else json.dumps(part)[:40]
            raise BadChat(f"has a turn with content that is no text ({kind})")
        texts.append(text)
    return "".join(texts)


def _call(call: object) -> object:
    """A call of a tool, with its arguments as an object: templates write that as JSON, and OpenAI's form is JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    if not isinstance(arguments, dict):
        return call
    return call | {"function": function | {"arguments": arguments}}


def _tools(value: object) -> list[dict] | None:
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = value
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadChat(f"has no list of JSON schemas in {TOOLS!r} for its chat")
    return tools


def of_table(row: dict, column: str) -> dict:
    """A row of Parquet, Arrow or a data set, whose calls and tools have the keys of all others, too: without these."""
    messages = row.get(column)
    if isinstance(messages, list):
        messages = list(map(_without_nulls_in_calls, messages))
    return row | {column: messages, TOOLS: _without_nulls(row.get(TOOLS))}


def _without_nulls_in_calls(message: object) -> object:
    if not isinstance(message, dict) or not message.get("tool_calls"):
        return message
    return message | {"tool_calls": _without_nulls(message["tool_calls"])}


def _without_nulls(value: object) -> object:
    if isinstance(value, list):
        return list(map(_without_nulls, value))
    if isinstance(value, dict):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return value


def choose_chat_column(names: Collection[str], source: str, column: str | None = None) -> str:
    """The column of chats: `column`, or the first of `COLUMNS` among `names`; ValueError naming `source` if none."""
    wanted = COLUMNS if column is None else (column,)
    for name in wanted:
        if name in names:
            _warn_of_system(names, source)
            return name
    among = ", ".join(sorted(names))
    raise ValueError(
        f"{source} has no column {wanted[0]!r} of chats among {among}: name one with {column_option(source)}."
    )


def _warn_of_system(names: Collection[str], source: str) -> None:
    for name in _SYSTEM:
        if name in names:
            warn_once(
                f"{source} has a column {name!r} beside its chats, which is not read: where it is meant, put it into "
                "the chats as a first turn of the role system."
            )


def column_option(source: str) -> str:
    """What names a column of `source`: a flag for files and data sets of flags, a key for those of a mixture."""
    return "--text_column" if source.startswith("--") else "text_column"


def make_chat_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from chats as text to token lists: `id` for the assistant's tokens, `~id` for all others.

    The template puts tokens before and after a chat, nothing is added. The function raises ValueError if the template
    fails, or does not show which tokens are the assistant's.
    """
    template = ChatTemplate(tokenizer)

    def encode(texts: Sequence[str | None]) -> list[list[int]]:
        return [_signed(template, text) for text in texts if text]

    return encode


def _signed(template: ChatTemplate, text: str) -> list[int]:
    try:
        filled = template.filled(chat_of(text))
    except ValueError as error:
        raise ValueError(
            f"--assistant_only_loss: the tokenizer's chat template fails on the chat {text[:80]}: {error}."
        ) from error
    signed = []
    for token, is_learned in zip(*template.tokens(filled), strict=True):
        signed.append(token if is_learned else ~token)
    return signed


def shortened(rows: Sequence[list[int]], longest: int, how: str) -> list[list[int]]:
    """The tokens of chats of at most `longest` tokens: longer ones are left out (`drop`) or lose their end (`cut`).

    A chat of which nothing to learn is left is left out.
    """
    if how == "drop":
        return [row for row in rows if len(row) <= longest]
    cut_rows = [row[:longest] for row in rows]
    return [row for row in cut_rows if max(row) >= 0]


def filled_chats(template: ChatTemplate, texts: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Chats filled into the template, as documents: their text and its token ids.

    Both lack the BOS token that every document gets anyway.
    """
    start = template.tokenizer.bos_token or ""
    documents = []
    for text in texts:
        filled = template.fill(chat_of(text)).removeprefix(start)
        documents.append((without_breaks(filled), template.encode(filled)))
    return documents
