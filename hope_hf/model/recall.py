"""Passages of what was read, found by the words of a question.

The search is BM25 (Robertson and Zaragoza 2009) as SQLite's FTS5 computes it, over pieces of the text that overlap by
half. Words are lower-cased, without diacritics, and stemmed as English ones.
"""

import re
import sqlite3
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .archive import BEGINS, EMPTY, documents_of

_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(words, tokenize = 'porter unicode61 remove_diacritics 2')"
_INSERT = "INSERT INTO passages(rowid, words) VALUES (?, ?)"
_DELETE = "DELETE FROM passages WHERE rowid = ?"
_COUNT = "SELECT count(*) FROM passages WHERE passages MATCH ?"
_SEARCH = "SELECT rowid, words, rank FROM passages WHERE passages MATCH ? ORDER BY rank, rowid"
_WORD = re.compile(r"\w+")
# The end of a token that ends a sentence or a line.
_END = re.compile(r"[.!?]['\"”’)]*\s*$|\n")


class Passage(NamedTuple):
    """A piece of what was read."""

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
        self.tokenizer, self.tokens = tokenizer, tokens
        self._ends = _ends_of_sentences(tokenizer)
        # columns of the archive that were indexed
        self._indexed = torch.empty(0, dtype=torch.int32)
        # first and last column of every passage, by its number in the database
        self._spans: list[tuple[int, int]] = []
        # a cache may move from thread to thread
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._database.execute(_TABLE)
        except sqlite3.OperationalError as error:
            raise ValueError(
                f"recall searches with SQLite's FTS5, which this Python's sqlite3 lacks ({error}): install a Python "
                "whose SQLite has it, as those of python.org, conda and Debian have"
            ) from None

    def is_of(self, tokenizer: PreTrainedTokenizerBase, row: Tensor) -> bool:
        """Whether this tokenizer made the index, and a row [T] of an archive begins with what was indexed."""
        begin = row[: len(self._indexed)]
        return tokenizer is self.tokenizer and torch.equal(begin, self._indexed)

    def grow(self, row: Tensor) -> None:
        """Index what a row [T] of an archive holds behind what was indexed.

        Raises:
            ValueError: a token is none of the tokenizer's.
        """
        if len(row) == len(self._indexed):
            return
        self._require_known(row)
        first_column = self._drop_unfinished()
        self._indexed = row
        first_number = len(self._spans)
        tokens_of_passages = []
        for start, ids in documents_of(row[first_column:]):
            column = first_column + start
            for span in spans_of_passages(ids, self._ends, self.tokens):
                self._spans.append((column + span.start, column + span.stop))
                tokens_of_passages.append(ids[span.start : span.stop])
        texts = self.tokenizer.batch_decode(
            tokens_of_passages, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._database.executemany(_INSERT, enumerate(texts, first_number))

    def _require_known(self, row: Tensor) -> None:
        """ValueError if the tokenizer lacks a token of a row [T]."""
        ids = row[row != EMPTY] % BEGINS
        known = len(self.tokenizer)
        if (ids >= known).any():
            raise ValueError(
                f"the cache has read tokens that the tokenizer, which has {known:,}, does not have: give the one of "
                "the model that read the text"
            )

    def _drop_unfinished(self) -> int:
        """Drop the last passage, which may go on, and return the column where indexing begins again."""
        if not self._spans:
            return 0
        start, _ = self._spans.pop()
        number = len(self._spans)
        self._database.execute(_DELETE, (number,))
        return start

    def search(self, question: str, pieces: int, stop: int | None = None) -> list[Passage]:
        """The passages that fit a question best, without overlaps, the best one first.

        A passage must hold one of the question's names, which are its capital words behind the first one, unless no
        passage does.

        Args:
            question: in words.
            pieces: the most passages.
            stop: column before which a passage ends, or `None`.
        """
        words = _WORD.findall(question)
        query = self._any_of(words)
        if not query:
            return []
        capitals = [word for word in words[1:] if word[0].isupper()]
        names = self._any_of(capitals)
        passages = []
        if names:
            passages = self._best(f"({names}) AND ({query})", pieces, stop)
        return passages or self._best(query, pieces, stop)

    def _any_of(self, words: list[str]) -> str:
        """A query for passages with any of the words; empty if none has one.

        Words of more than half of the passages weigh nothing and cost time, and are left out if there are others.
        """
        most = len(self._spans) / 2
        rare = []
        common = []
        for word in dict.fromkeys(map(str.lower, words)):
            term = f'"{word}"'
            (count,) = self._database.execute(_COUNT, (term,)).fetchone()
            if count > most:
                common.append(term)
            elif count:
                rare.append(term)
        return " OR ".join(rare or common)

    def _best(self, query: str, pieces: int, stop: int | None) -> list[Passage]:
        """The best passages of a query of FTS5."""
        passages: list[Passage] = []
        for number, text, rank in self._database.execute(_SEARCH, (query,)):
            if len(passages) == pieces:
                break
            passage = Passage(text, *self._spans[number], score=-rank)
            is_late = stop is not None and passage.stop > stop
            if not is_late and not any(map(passage.overlaps, passages)):
                passages.append(passage)
        return passages


def spans_of_passages(ids: list[int], ends: frozenset[int], tokens: int) -> Iterator[range]:
    """The passages of a document: whole sentences, at most `tokens` long, or a part of a longer sentence.

    Each begins with the first sentence behind the middle of the one before.

    Args:
        ids: tokens of the document.
        ends: tokens that end a sentence.
        tokens: length of a passage.
    """
    stops = [index for index, token in enumerate(ids, 1) if token in ends]
    # behind the last sentence, words without an end are one
    stops.append(len(ids))
    start = stop = 0
    while stop < len(ids):
        middle = start + max(tokens // 2, 1)
        # the last sentence that ends within the passage
        last = bisect_right(stops, start + tokens) - 1
        stop = stops[last] if last >= 0 and stops[last] > middle else min(start + tokens, len(ids))
        yield range(start, stop)
        next_sentence = stops[bisect_right(stops, min(middle, len(ids) - 1))]
        start = min(next_sentence, stop)


def join_passages(passages: list[Passage]) -> str:
    """Passages as they are read before a question, the best one last."""
    context = ""
    for passage in reversed(passages):
        context += f"{passage.text.strip()}\n\n"
    return context


def _ends_of_sentences(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """The tokens that end a sentence or a line."""
    vocabulary = [[token] for token in range(len(tokenizer))]
    texts = tokenizer.batch_decode(vocabulary)
    return frozenset(token for token, text in enumerate(texts) if _END.search(text))
