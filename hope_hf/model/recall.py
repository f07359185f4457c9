"""Passages of what was read, found by the words of a question.

The search is BM25 (Robertson and Zaragoza 2009) as SQLite's FTS5 computes it, over pieces of the text that overlap by
half. Words are lower-cased, without diacritics, and stemmed as English ones. In scripts without spaces between words
(Chinese, Japanese, Thai and others, and Korean, whose endings are parts of words), two characters make a word.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .archive import BEGINS, EMPTY, documents_of

_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(words, tokenize = 'porter unicode61 remove_diacritics 2')"
_INSERT = "INSERT OR REPLACE INTO passages(rowid, words) VALUES (?, ?)"
_COUNT = "SELECT count(*) FROM passages WHERE passages MATCH ?"
_SEARCH = "SELECT rowid, rank FROM passages WHERE passages MATCH ? ORDER BY rank, rowid"
# A character of a script without spaces between words.
_CHARACTER = (
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    r"\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"  # Chinese, Japanese, Korean
)
_CHARACTERS = re.compile(_CHARACTER)
_WORD = re.compile(rf"{_CHARACTER}+|(?:(?!{_CHARACTER})\w)+")
# A text of which the tokenizer lacks one token in so many was read with another one.
_LACKED = 10
# The end of a token that ends a sentence or a line.
_END = re.compile(r"[.!?。！？؟।]['\"”’)」』]*\s*$|\n")


class Passage(NamedTuple):
    """A piece of what was read.

    Example:

    ```python
    >>> from hope_hf import Passage
    >>> passage = Passage(text="The queen of Arle likes fish.", start=5, stop=12, score=2.5)
    >>> passage.overlaps(Passage(text=" fish. An old man", start=10, stop=15, score=1.0))
    True
    ```
    """

    text: str
    # the columns of the cache that hold its tokens
    start: int
    stop: int
    # of BM25: higher fits better
    score: float

    def overlaps(self, other: "Passage") -> bool:
        """Whether both hold a token."""
        return self.start < other.stop and other.start < self.stop


class PassageIndex:
    """An index of the passages of one row. It grows with the text, and reads nothing twice but an unfinished passage.

    Raises:
        ValueError: SQLite is built without FTS5.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tokens: int):
        """`tokens`: length of a passage."""
        self.tokenizer = tokenizer
        self.tokens = tokens
        # tokens of the text, and those that end a sentence
        self._seen: set[int] = set()
        self._ends: set[int] = set()
        # columns of the archive that were indexed
        self._indexed = torch.empty(0, dtype=torch.int32)
        # columns of every passage, by its number in the database
        self._spans: list[range] = []
        self._database = _new_database()

    def is_of(self, tokenizer: PreTrainedTokenizerBase, row: Tensor) -> bool:
        """Whether this tokenizer made the index, and a row [T] of an archive begins with what was indexed."""
        if tokenizer is not self.tokenizer:
            return False
        begin = row[: len(self._indexed)]
        return torch.equal(begin, self._indexed)

    def grow(self, row: Tensor) -> None:
        """Index what a row [T] of an archive holds behind what was indexed.

        Raises:
            ValueError: the text was read with another tokenizer.
        """
        indexed = len(self._indexed)
        if len(row) == indexed:
            return
        readable = self._readable(row)
        self._find_ends(readable[indexed:])
        begin = 0
        if self._spans:
            # it may go on
            last = self._spans.pop()
            begin = last.start
        for start, ids in documents_of(readable[begin:]):
            for span in spans_of_passages(ids, self._ends, self.tokens):
                first = begin + start + span.start
                ids_of_passage = ids[span.start : span.stop]
                self._add(first, ids_of_passage)
        self._indexed = row

    def _add(self, first: int, ids: list[int]) -> None:
        """Index a passage, whose tokens begin at column `first`."""
        number = len(self._spans)
        stop = first + len(ids)
        self._spans.append(range(first, stop))
        text = self._text_of(ids)
        words = _with_spaces(text)
        self._database.execute(_INSERT, (number, words))

    def _text_of(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _readable(self, row: Tensor) -> Tensor:
        """A row [T] of an archive without the tokens that the tokenizer lacks: EMPTY in their columns.

        A model that has more embeddings than its tokenizer has tokens can generate some.

        Raises:
            ValueError: it lacks so many that the text was read with another one.
        """
        ids = row % BEGINS
        has_token = row != EMPTY
        lacks = has_token & (ids >= len(self.tokenizer))
        if not lacks.any():
            return row
        lacks &= ids >= self._vocabulary
        most = has_token.sum() / _LACKED
        if lacks.sum() > most:
            raise ValueError(
                f"the cache has read tokens that the tokenizer, which has {self._vocabulary:,}, does not have: give "
                "the one of the model that read the text"
            )
        return row.masked_fill(lacks, EMPTY)

    @cached_property
    def _vocabulary(self) -> int:
        """Ids of the tokenizer, with the holes that a vocabulary may have."""
        ids = self.tokenizer.get_vocab().values()
        return max(ids) + 1

    def _find_ends(self, columns: Tensor) -> None:
        """Add to the tokens that end a sentence or a line those of columns [N]."""
        has_token = columns != EMPTY
        ids = columns[has_token] % BEGINS
        tokens = set(ids.unique().tolist())
        new = tokens - self._seen
        for token in new:
            text = self._text_of([token])
            if _END.search(text):
                self._ends.add(token)
            self._seen.add(token)

    def search(self, question: str, pieces: int) -> list[Passage]:
        """The passages that fit a question best, without overlaps, the best one first.

        A passage must hold one of the question's names, which are its capital words behind the first one, unless no
        passage does.

        Args:
            question: in words.
            pieces: the most passages.
        """
        words = _WORD.findall(question)
        later_words = words[1:]
        capitals = [word for word in later_words if word[0].isupper()]
        query = self._any_of(words)
        names = self._any_of(capitals)
        passages = []
        if names:
            with_a_name = f"({names}) AND ({query})"
            passages = self._best(with_a_name, pieces)
        if query and not passages:
            passages = self._best(query, pieces)
        return passages

    def _any_of(self, words: list[str]) -> str:
        """A query for passages with any of the words; empty if none has one.

        Words of more than half of the passages weigh nothing and cost time, and are left out if there are others.
        """
        most = len(self._spans) / 2
        rare = []
        common = []
        terms = chain.from_iterable(map(_terms, words))
        for term in dict.fromkeys(terms):
            counted = self._database.execute(_COUNT, (term,))
            (count,) = counted.fetchone()
            if count > most:
                common.append(term)
            elif count:
                rare.append(term)
        return " OR ".join(rare or common)

    def _best(self, query: str, pieces: int) -> list[Passage]:
        """The best passages of a query of FTS5; of those with the same words, as of a text read twice, one."""
        passages: dict[str, Passage] = {}
        taken: list[Passage] = []
        ranked = self._database.execute(_SEARCH, (query,))
        for number, rank in ranked:
            if len(passages) == pieces:
                break
            span = self._spans[number]
            columns = self._indexed[span.start : span.stop]
            ids = (columns % BEGINS).tolist()
            text = self._text_of(ids)
            passage = Passage(text, span.start, span.stop, score=-rank)
            if any(map(passage.overlaps, taken)):
                continue
            # also one with known words: what overlaps it says them again
            taken.append(passage)
            passages.setdefault(text.strip(), passage)
        return list(passages.values())


def _new_database():
    """A database in memory with the table of passages; ValueError if this Python has none."""
    try:
        # imported here, since a Python can be built without it, or without FTS5
        import sqlite3

        # a cache may move from thread to thread
        database = sqlite3.connect(":memory:", check_same_thread=False)
        database.execute(_TABLE)
    except Exception as error:
        raise ValueError(
            f"recall searches with SQLite's FTS5, which this Python's sqlite3 lacks ({error}): install a Python whose "
            "SQLite has it, as those of python.org, conda and Debian have"
        ) from None
    return database


def check_search(question: str, tokenizer: PreTrainedTokenizerBase, tokens: int, pieces: int) -> None:
    """ValueError if these arguments of `HopeCache.recall` are no search."""
    if not isinstance(question, str):
        kind = type(question).__name__
        raise ValueError(f"question is a {kind}: give one text, and call recall for each of them")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        kind = type(tokenizer).__name__
        raise ValueError(f"tokenizer is a {kind}: give the tokenizer of the model")
    if type(tokens) is not int or tokens < 1:
        raise ValueError(f"tokens is {tokens}, the length of a passage: give a whole number of at least 1")
    if type(pieces) is not int or pieces < 0:
        raise ValueError(f"pieces is {pieces}, the number of passages: give a whole number, 0 or more")


def spans_of_passages(ids: list[int], ends: set[int], tokens: int) -> Iterator[range]:
    """The passages of a document: whole sentences, at most `tokens` long, or a part of a longer sentence.

    Each begins with the first sentence behind the middle of the one before.

    Args:
        ids: tokens of the document.
        ends: tokens that end a sentence.
        tokens: length of a passage.
    """
    length = len(ids)
    stops = [index for index, token in enumerate(ids, 1) if token in ends]
    # behind the last sentence, words without an end are one
    stops = [0, *stops, length]
    half = max(tokens // 2, 1)
    start = 0
    stop = 0
    while stop < length:
        middle = start + half
        stop = min(start + tokens, length)
        sentences = bisect_right(stops, stop)
        end_of_sentence = stops[sentences - 1]
        if end_of_sentence > middle:
            stop = end_of_sentence
        yield range(start, stop)
        before = min(middle, length - 1)
        next_sentence = bisect_right(stops, before)
        start = min(stops[next_sentence], stop)


def join_passages(passages: list[Passage]) -> str:
    """Passages as they are read before a question, the best one last.

    Example:

    ```python
    >>> from hope_hf import Passage, join_passages
    >>> best, second = Passage("A ship sinks.", 7, 11, 2.5), Passage("His dog sleeps.", 0, 4, 1.0)
    >>> print(join_passages([best, second]).rstrip())
    His dog sleeps.
    <BLANKLINE>
    A ship sinks.
    ```
    """
    context = ""
    for passage in reversed(passages):
        text = passage.text.strip()
        context += f"{text}\n\n"
    return context


def _with_spaces(text: str) -> str:
    """A text with spaces around the characters of scripts without them, which FTS5 would join to long words."""
    return _CHARACTERS.sub(r" \g<0> ", text)


def _terms(word: str) -> list[str]:
    """A word for FTS5: itself, or, in a script without spaces, each two of its characters."""
    parts = [word.lower()]
    has_characters = _CHARACTERS.match(word)
    if has_characters and len(word) > 2:
        parts = map("".join, pairwise(word))
    return [f'"{_with_spaces(part)}"' for part in parts]
