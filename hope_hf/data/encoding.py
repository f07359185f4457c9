"""Texts to token ids, each beginning as a prompt does.

The token before a document is EOS, or the BOS of a tokenizer that puts one before every prompt: then EOS follows the
document.

An encoding takes about 110 bytes of memory per byte of text. So little text is encoded together, and a long text is
encoded in overlapping windows. They are joined where tokens of both begin, which gives the tokens of the whole text.
"""

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from hope_hf.common.process import warn_once

from .word_encoding import word_encoder

Encode = Callable[[Sequence[str | None]], list[list[int]]]

# Characters of a window, of its overlap at each end, and of the texts that are encoded together.
WINDOW = 1 << 18
MARGIN = 1 << 12
_TOGETHER = 1 << 19


def make_encoder(tokenizer: PreTrainedTokenizerBase) -> Encode:
    """A function from texts to token lists, each beginning with `document_start`; blank texts give none.

    Text that spells a special token is encoded as ordinary text.
    """
    start = document_start(tokenizer)
    end = [] if start == tokenizer.eos_token_id else [tokenizer.eos_token_id]
    encode_all = _fast(tokenizer) or _slow(tokenizer)

    def encode(texts: Sequence[str | None]) -> list[list[int]]:
        documents = [text for text in texts if text and not text.isspace()]
        rows = []
        for group in _groups(documents):
            for row in encode_all(group):
                rows.append([start, *row, *end])
        return rows

    return encode


def document_start(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that begins every document: the one that the tokenizer puts before prompts, or else EOS.

    Warns if the tokenizer puts several tokens before prompts.
    """
    before = tokens_before(tokenizer)
    if len(before) > 1:
        names = " ".join(tokenizer.convert_ids_to_tokens(before))
        warn_once(
            f"The tokenizer begins prompts with {names}, and documents begin with its EOS token {tokenizer.eos_token} "
            "alone: begin prompts with that token alone, too."
        )
    return before[0] if len(before) == 1 else tokenizer.eos_token_id


def tokens_before(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that the tokenizer puts before a prompt."""
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    prompt = tokenizer("a", add_special_tokens=True)["input_ids"]
    for begin in range(len(prompt)):
        if prompt[begin:][: len(text)] == text:
            return prompt[:begin]
    return []


def plain_ids(tokenizer: PreTrainedTokenizerBase, text: str, begins: bool = False) -> list[int]:
    """Token ids of a text, in which special tokens that it spells are ordinary text.

    begins: whether the tokenizer puts its own tokens before and after the text.
    """
    # verbose=False: no warning that a text exceeds the model's input.
    return tokenizer(
        text,
        add_special_tokens=begins,
        split_special_tokens=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def _groups(texts: list[str]) -> Iterator[list[str]]:
    group = []
    characters = 0
    for text in texts:
        if group and characters + len(text) > _TOGETHER:
            yield group
            group = []
            characters = 0
        group.append(text)
        characters += len(text)
    if group:
        yield group


def _fast(tokenizer: PreTrainedTokenizerBase):
    """Encodes with the tokenizers library directly, without offsets and masks: two thirds of the time of a call."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    # A copy, since the settings below must not change the caller's tokenizer.
    backend = copy.deepcopy(backend)
    backend.no_truncation()
    backend.no_padding()
    words = word_encoder(backend)

    def encode_together(texts: list[str]) -> list[list[int]]:
        if max(map(len, texts)) > WINDOW:
            return [_in_windows(backend, text) for text in texts]
        return [row.ids for row in backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_all(texts: list[str]) -> list[list[int]]:
        # Set here: a copy in another process does not keep it.
        backend.encode_special_tokens = True
        if words is None:
            return encode_together(texts)
        rows = []
        for text in texts:
            is_cut = text.isascii() and len(text) <= WINDOW
            rows.append(words.encode(text) if is_cut else encode_together([text])[0])
        return rows

    return encode_all


def _slow(tokenizer: PreTrainedTokenizerBase):
    return lambda texts: [plain_ids(tokenizer, text) for text in texts]


def _in_windows(backend: Tokenizer, text: str) -> list[int]:
    """The ids of a text of any length."""
    ids = []
    # The first token of the window that is not in `ids`, and the place about which the next window is joined.
    first = 0
    cut = WINDOW
    window = _Window(backend, text, 0, cut + MARGIN)
    while cut < len(text):
        following = _Window(backend, text, cut - MARGIN, cut + WINDOW + MARGIN)
        begins = window.token_starts(cut)
        begins_of_both = begins & following.token_starts(cut)
        place = min(begins_of_both or begins or {cut}, key=lambda place: abs(place - cut))
        if place not in begins_of_both:
            # One token spans thousands of characters, or the same few characters repeat endlessly.
            warn_once(
                f"A text has more than {MARGIN:,} characters without the end of a word: it is encoded in windows, "
                "and its tokens may differ from those of the whole text."
            )
            following = _Window(backend, text, place, cut + WINDOW + MARGIN)
        ids += window.ids[first : window.index(place)]
        window = following
        first = following.index(place)
        cut += WINDOW
    return ids + window.ids[first:]


class _Window:
    """The tokens of a part of a text; places are character positions in the whole text."""

    def __init__(self, backend: Tokenizer, text: str, begin: int, end: int):
        encoding = backend.encode(text[begin:end], add_special_tokens=False)
        self.ids = encoding.ids
        self._starts = [begin + start for start, _ in encoding.offsets]

    def index(self, place: int) -> int:
        """How many tokens begin before a place."""
        return bisect_left(self._starts, place)

    def token_starts(self, cut: int) -> set[int]:
        """Places around the cut, far from the ends of the window, where a token begins."""
        first = max(1, self.index(cut - MARGIN // 2))
        return set(self._starts[first : self.index(cut + MARGIN // 2)])
