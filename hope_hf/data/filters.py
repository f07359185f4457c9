"""Which documents of a corpus are kept; every other one is counted under its reason."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

# The most frequent words of each language, without those that two of them share.
_COMMON = {
    "de": "der die und das ist nicht ich sie den mit dem auf ein eine auch sich wie wird sind von zu",
    "en": "the of and to that was for with as his he it is are this be have which by from",
    "es": "el los las y que por una con para su como más pero lo este esta ser muy",
    "fr": "le les et des une dans qui pour pas sur au avec il est plus par je vous ce",
    "it": "il che di per non una sono della gli più come anche questo nel alla lo si",
    "nl": "de het een van en niet dat zijn voor met op te aan er ook maar naar wordt",
    "pt": "o os que não uma com para mais como mas ao das dos foi ele seu pela são",
}
LANGUAGES = tuple(_COMMON)
_WORDS = {language: frozenset(words.split()) for language, words in _COMMON.items()}
# Words read of each document, and the share of them that running text of a language has among its common words.
_MOST_WORDS = 2_000
_LEAST_SHARE = 0.08


@dataclass(frozen=True)
class Filters:
    """The conditions of one corpus; lengths in characters."""

    min_length: int | None = None
    max_length: int | None = None
    deduplicate: bool = False
    """Keep the first of documents whose texts are equal."""
    language: str | None = None
    """One of `LANGUAGES`: keep documents that seem to be in it, by the share of its most common words."""


def keep(texts: Iterable[str | None], filters: Filters) -> tuple[list[int], Counter]:
    """Indices of the documents that pass, and how many were dropped by each condition."""
    kept, dropped, judge = [], Counter(), Judge(filters)
    for index, text in enumerate(texts):
        reason = judge.reason(text)
        if reason is None:
            kept.append(index)
        else:
            dropped[reason] += 1
    return kept, dropped


def seems_to_be(text: str, language: str) -> bool:
    """Whether no language has more of its common words in the text, and these are enough for running text."""
    words = [match.group().lower() for match in islice(re.finditer(r"[^\W\d_]+", text), _MOST_WORDS)]
    counts = {name: sum(word in common for word in words) for name, common in _WORDS.items()}
    return bool(words) and counts[language] == max(counts.values()) and counts[language] >= _LEAST_SHARE * len(words)


class Judge:
    """Says of one document after the other whether it passes."""

    def __init__(self, filters: Filters):
        self._filters = filters
        self._seen: set[bytes] = set()

    def reason(self, text: str | None) -> str | None:
        """Why the next document is dropped; None where it passes."""
        filters = self._filters
        if not text or text.isspace():
            return "blank"
        if filters.min_length is not None and len(text) < filters.min_length:
            return "min_length"
        if filters.max_length is not None and len(text) > filters.max_length:
            return "max_length"
        if filters.language is not None and not seems_to_be(text, filters.language):
            return "language"
        if filters.deduplicate:
            digest = blake2b(text.encode("utf-8", errors="surrogatepass"), digest_size=16).digest()
            if digest in self._seen:
                return "deduplicate"
            self._seen.add(digest)
        return None
