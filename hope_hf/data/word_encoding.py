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
    # Not every system says which cores a process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores > FEW_CORES or not cuts_words_of_gpt2(backend):
        return None
    return WordEncoder(backend)


def cuts_words_of_gpt2(backend: Tokenizer) -> bool:
    """Whether the tokenizer is a byte-level BPE with the words of GPT-2, and equal words have equal tokens."""
    parts = json.loads(backend.to_str())
    if parts["normalizer"] is not None:
        return False
    for token in parts["added_tokens"]:
        # It is looked for in the text, before this is cut.
        if not token["special"]:
            return False
    words = parts["pre_tokenizer"] or {}
    model = parts["model"]
    # Dropout draws the tokens of a word.
    is_bpe = model["type"] == "BPE" and not model["dropout"]
    return is_bpe and {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}.items() <= words.items()


class WordEncoder:
    """Encodes texts in ASCII, and remembers the tokens of words."""

    def __init__(self, backend: Tokenizer):
        """`backend`: its special tokens are ordinary text (`encode_special_tokens`) at each call."""
        self._backend = backend
        self._ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The token ids of a text in ASCII."""
        words = _WORD.findall(text)
        if len(self._ids) > MOST_WORDS:
            self._ids.clear()
        new = list(set(words).difference(self._ids))
        encodings = self._backend.encode_batch_fast(new, add_special_tokens=False)
        for word, encoding in zip(new, encodings, strict=True):
            self._ids[word] = encoding.ids
        ids = map(self._ids.__getitem__, words)
        return list(chain.from_iterable(ids))
