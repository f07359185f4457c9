"""Tokenizers as their tokenizer.json says.

transformers builds many of its tokenizer classes anew: from the file's vocabulary, and with the class's rules for
cutting a text into words, whatever the file says. The file has the rules with which a model was trained.
"""

import json

from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from .process import warn_once
from .weights import find_file

FILE = "tokenizer.json"
# Where rules of tokenizers differ: spaces, digits, apostrophes, capitals, line ends, forms of one character, scripts.
_TEXT = """ It's  1,234.50 at 12:30;\tshe'LL pay 20%\r\n\r\n\n    if x1 == 10:  # TODO\n\t\treturn 'a_b'  \n
CamelCase http://example.org/a?b=1 e\u0301 \u00e9 \ufb01 \uff26\uff35\uff2c\uff2c \u00a0 \u2028 \u3000\u4f60\u597d
\u041f\u0440\u0438\u0432\u0435\u0442 \u0e44\u0e17\u0e22 \u0661\u0662\u0663 \U0001f600\U0001f3fd \u2581x ... --- """
# Entries of a vocabulary that are tried, evenly spread.
_ENTRIES = 10_000


def read_tokenizer(place: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name, with the ids of its tokenizer.json; warns if its class gives others.

    Special tokens, and what is put before and after a prompt, are those of the class. Raises ValueError if an added
    token loses its id, and whatever transformers raises.
    """
    tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trust_remote_code)
    kind = type(tokenizer)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Code of a folder may do as it likes.
    if backend is None or not kind.__module__.startswith("transformers."):
        return tokenizer
    file = find_file(place, FILE)
    if file is None:
        return tokenizer
    # This class alone reads the file as it is.
    reads_the_file = kind is PreTrainedTokenizerFast
    as_written = backend if reads_the_file else Tokenizer.from_file(str(file))
    prefix_space = None if reads_the_file else get_tokenizer_config(place).get("add_prefix_space")
    _set_prefix_space(as_written, prefix_space)
    added_tokens = json.loads(file.read_text(encoding="utf-8")).get("added_tokens") or []
    _require_ids_of_added_tokens(as_written, added_tokens)
    if reads_the_file or _give_equal_ids(backend, as_written, added_tokens):
        return tokenizer
    warn_once(
        f"{place}: its {FILE} is followed, and transformers' {kind.__name__} gives other ids, so programs that load "
        "it with AutoTokenizer may read text otherwise."
    )
    special_tokens = {}
    for name, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str) and as_written.token_to_id(token) is not None:
            special_tokens[name] = token
    followed = PreTrainedTokenizerFast.from_pretrained(place, **special_tokens)
    followed.backend_tokenizer.post_processor = backend.post_processor
    _set_prefix_space(followed.backend_tokenizer, prefix_space)
    return followed


def _set_prefix_space(backend: Tokenizer, prefix_space: bool | None) -> None:
    """What tokenizer_config.json says of a space before a text goes before tokenizer.json."""
    if prefix_space is not None and isinstance(backend.pre_tokenizer, ByteLevel):
        backend.pre_tokenizer.add_prefix_space = prefix_space


def _require_ids_of_added_tokens(backend: Tokenizer, added_tokens: list[dict]) -> None:
    """ValueError if the library numbers an added token anew, as it does behind a gap of the vocabulary."""
    for token in added_tokens:
        name, index = token["content"], token["id"]
        loaded = backend.token_to_id(name)
        if loaded != index:
            raise ValueError(
                f"its {FILE} gives the added token {name!r} the id {index}, and the library tokenizers {loaded}: add "
                "entries to its vocabulary until no id before is missing"
            )


def _give_equal_ids(first: Tokenizer, second: Tokenizer, added_tokens: list[dict]) -> bool:
    """Whether both give a text in which rules differ, and the entries of the vocabulary, the same ids."""
    for token in added_tokens:
        if first.token_to_id(token["content"]) != second.token_to_id(token["content"]):
            return False
    size = second.get_vocab_size()
    entries = []
    for index in range(0, size, 1 + size // _ENTRIES):
        entries.append(second.decode([index], skip_special_tokens=True))
    texts = [_TEXT, "".join(entries), "  ".join(entries)]
    for text in texts:
        ids = [backend.encode(text, add_special_tokens=False).ids for backend in (first, second)]
        if ids[0] != ids[1]:
            return False
    return True
