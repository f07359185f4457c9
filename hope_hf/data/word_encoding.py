"""Token ids of texts word by word, each word encoded once: on few cores in half the time of the tokenizers library.

It holds for a byte-level BPE whose words are those of GPT-2, as `train_tokenizer` makes it, and texts in ASCII: tokens
never cross a word, and without other characters Python's expressions cut the same words.
"""

import json
import os
import re
from itertools import chain

from tokenizers import Tokenizer

# The library encodes in threads: with more cores than this it is done earlier.
FEW_CORES = 2
# Words whose tokens are remembered.
MOST_WORDS = 1 << 18
# Other than in Python, the separators 0x1c to 0x1f are no spaces.
_SPACE = r" \t\n\r\f\v"
_WORD = re.compile(
    rf"'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[0-9]+| ?[^{_SPACE}A-Za-z0-9]+|[{_SPACE}]+(?![^{_SPACE}])|[{_SPACE}]+"
)


def word_encoder(backend: Tokenizer) -> "WordEncoder | None":
    """An encoder with the ids of `backend`; None where it would be slower, or the tokenizer cuts other words."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return WordEncoder(backend) if cores <= FEW_CORES and cuts_words_of_gpt2(backend) else None


def cuts_words_of_gpt2(backend: Tokenizer) -> bool:
    """Whether the tokenizer is a byte-level BPE with the words of GPT-2, and equal words have equal tokens."""
    parts = json.loads(backend.to_str())
    model, words = parts["model"], parts["pre_tokenizer"] or {}
    is_bpe = model["type"] == "BPE" and not model["dropout"]
    cuts_them = words.get("type") == "ByteLevel" and words.get("use_regex") and not words["add_prefix_space"]
    # Tokens that are no special ones are looked for in the text, before it is cut.
    only_special = all(token["special"] for token in parts["added_tokens"])
    return bool(is_bpe and cuts_them and only_special and parts["normalizer"] is None)


class WordEncoder:
    """Encodes texts in ASCII, and remembers the tokens of words."""

    def __init__(self, backend: Tokenizer):
        """`backend`: its special tokens are ordinary text (`encode_special_tokens`) at each call."""
        self._backend = backend
        self._ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The token ids of a text in ASCII."""
        words = _WORD.findall(text)
        new = list(set(words).difference(self._ids))
        if len(self._ids) > MOST_WORDS:
            self._ids.clear()
            new = list(set(words))
        for word, encoding in zip(new, self._backend.encode_batch_fast(new, add_special_tokens=False), strict=True):
            self._ids[word] = encoding.ids
        return list(chain.from_iterable(map(self._ids.__getitem__, words)))
