"""Passages of what was read, found by the words of a question.

The search is BM25 (Robertson and Zaragoza 2009) as SQLite's FTS5 computes it, over pieces of the text that overlap by
half. Words are lower-cased, without diacritics, and stemmed as English ones. In scripts without spaces between words
(Chinese, Japanese, Thai and others, and Korean, whose endings are parts of words), two characters make a word.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .archive import BEGINS, EMPTY, documents_of

_TABLE = "CREATE VIRTUAL TABLE passages USING fts5(words, tokenize = 'porter unicode61 remove_diacritics 2')"
_INSERT = "INSERT INTO passages(rowid, words) VALUES (?, ?)"
_DELETE = "DELETE FROM passages WHERE rowid = ?"
_COUNT = "SELECT count(*) FROM passages WHERE passages MATCH ?"
_SEARCH = "SELECT rowid, rank FROM passages WHERE passages MATCH ? ORDER BY rank, rowid"
# A character of a script without spaces between words.
_CHARACTER = (
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Burmese, Khmer
    r"\u3005-\u30ff\u3400-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]"  # Chinese, Japanese, Korean
)
_CHARACTERS = re.compile(_CHARACTER)
_WORD = re.compile(rf"{_CHARACTER}+|(?:(?!{_CHARACTER})\w)+")
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
        self.tokenizer, self.tokens = tokenizer, tokens
        # tokens of the text, and those that end a sentence
        self._known: set[int] = set()
        self._ends: set[int] = set()
        # columns of the archive that were indexed
        self._indexed = torch.empty(0, dtype=torch.int32)
        # first and last column of every passage, by its number in the database
        self._spans: list[tuple[int, int]] = []
        self._database = _new_database()

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
        new_columns = row[len(self._indexed) :]
        new_ids = new_columns[new_columns != EMPTY] % BEGINS
        self._require_known(new_ids)
        self._find_ends(new_ids)
        first_column = self._drop_unfinished()
        self._indexed = row
        first_number = len(self._spans)
        tokens_of_passages = []
        for start, ids in documents_of(row[first_column:]):
            column = first_column + start
            for span in spans_of_passages(ids, self._ends, self.tokens):
                self._spans.append((column + span.start, column + span.stop))
                tokens_of_passages.append(ids[span.start : span.stop])
        texts = map(_with_spaces, self._decoded(tokens_of_passages))
        self._database.executemany(_INSERT, enumerate(texts, first_number))

    def _decoded(self, rows: list[list[int]]) -> list[str]:
        """The texts of rows of tokens."""
        # tokenizers make one text of no row
        if not rows:
            return []
        return self.tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _require_known(self, ids: Tensor) -> None:
        """ValueError if the tokenizer lacks one of the tokens [N]."""
        known = len(self.tokenizer)
        if (ids >= known).any():
            # ids of a vocabulary may have holes
            known = max(self.tokenizer.get_vocab().values()) + 1
        if (ids >= known).any():
            raise ValueError(
                f"the cache has read tokens that the tokenizer, which has {known:,}, does not have: give the one of "
                "the model that read the text"
            )

    def _find_ends(self, ids: Tensor) -> None:
        """Add to the tokens that end a sentence or a line those of the tokens [N]."""
        new = set(ids.unique().tolist()) - self._known
        self._known |= new
        texts = self._decoded([[token] for token in new])
        for token, text in zip(new, texts, strict=True):
            if _END.search(text):
                self._ends.add(token)

    def _drop_unfinished(self) -> int:
        """Drop the last passage, which may go on, and return the column where indexing begins again."""
        if not self._spans:
            return 0
        start, _ = self._spans.pop()
        number = len(self._spans)
        self._database.execute(_DELETE, (number,))
        return start

    def search(self, question: str, pieces: int) -> list[Passage]:
        """The passages that fit a question best, without overlaps, the best one first.

        A passage must hold one of the question's names, which are its capital words behind the first one, unless no
        passage does.

        Args:
            question: in words.
            pieces: the most passages.
        """
        words = _WORD.findall(question)
        query = self._any_of(words)
        if not query:
            return []
        capitals = [word for word in words[1:] if word[0].isupper()]
        names = self._any_of(capitals)
        passages = []
        if names:
            passages = self._best(f"({names}) AND ({query})", pieces)
        return passages or self._best(query, pieces)

    def _any_of(self, words: list[str]) -> str:
        """A query for passages with any of the words; empty if none has one.

        Words of more than half of the passages weigh nothing and cost time, and are left out if there are others.
        """
        most = len(self._spans) / 2
        rare = []
        common = []
        terms = chain.from_iterable(map(_terms, words))
        for term in dict.fromkeys(terms):
            (count,) = self._database.execute(_COUNT, (term,)).fetchone()
            if count > most:
                common.append(term)
            elif count:
                rare.append(term)
        return " OR ".join(rare or common)

    def _best(self, query: str, pieces: int) -> list[Passage]:
        """The best passages of a query of FTS5."""
        passages: list[Passage] = []
        for number, rank in self._database.execute(_SEARCH, (query,)):
            if len(passages) == pieces:
                break
            start, stop = self._spans[number]
            ids = (self._indexed[start:stop] % BEGINS).tolist()
            (text,) = self._decoded([ids])
            passage = Passage(text, start, stop, score=-rank)
            if not any(map(passage.overlaps, passages)):
                passages.append(passage)
        return passages


def _new_database():
    """A database in memory with the table of passages; ValueError if this Python has none."""
    try:
        # imported here, since a Python can be built without it
        import sqlite3
    except ImportError as error:
        raise _without_search(error) from None
    # a cache may move from thread to thread
    database = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        database.execute(_TABLE)
    except sqlite3.OperationalError as error:
        raise _without_search(error) from None
    return database


def _without_search(error: Exception) -> ValueError:
    return ValueError(
        f"recall searches with SQLite's FTS5, which this Python's sqlite3 lacks ({error}): install a Python whose "
        "SQLite has it, as those of python.org, conda and Debian have"
    )


def check_search(question: str, tokenizer: PreTrainedTokenizerBase, tokens: int, pieces: int) -> None:
    """ValueError if these arguments of `HopeCache.recall` are no search."""
    if not isinstance(question, str):
        raise ValueError(f"question is a {type(question).__name__}: give one text, and call recall for each of them")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ValueError(f"tokenizer is a {type(tokenizer).__name__}: give the tokenizer of the model")
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
        context += f"{passage.text.strip()}\n\n"
    return context


def _with_spaces(text: str) -> str:
    """A text with spaces around the characters of scripts without them, which FTS5 would join to long words."""
    return _CHARACTERS.sub(r" \g<0> ", text)


def _terms(word: str) -> list[str]:
    """A word for FTS5: itself, or, in a script without spaces, each two of its characters."""
    if len(word) < 3 or not _CHARACTERS.match(word):
        return [f'"{_with_spaces(word.lower())}"']
    return [f'"{first} {second}"' for first, second in pairwise(word)]
