"""Segments of `--segments`: texts of a mixture file, cut to their limits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hope_hf.data import Corpus, passing, read_mixture

from ..subject import Subject


@dataclass(frozen=True)
class Segment:
    """A text as documents [T] of token ids, each after a start token, and the bytes of all that is scored."""

    name: str
    documents: list[Tensor]
    num_bytes: int


def read_segments(path: str) -> list[Corpus]:
    """The segments of the file, in its order. Raises ValueError where it cannot be read or has fewer than two."""
    corpora = read_mixture(path, "--segments")
    if len(corpora) < 2:
        raise ValueError(f"--segments {path} has one segment: forgetting needs two or more.")
    for corpus in corpora:
        if corpus.shards:
            raise ValueError(f"--segments {path}, corpus {corpus.name}, has shards: name its text with files.")
    return corpora


def open_segment(path: str, corpus: Corpus, subject: Subject) -> Segment:
    """Read a segment up to its max_documents and max_tokens, from its beginning.

    Raises ValueError where the text is shorter than a limit.
    """
    where = f"--segments {path}, corpus"
    rows, _ = passing(corpus, where)
    if corpus.max_documents is not None and corpus.max_documents > len(rows):
        raise ValueError(
            f"{where} {corpus.name} has {len(rows)} documents, fewer than max_documents {corpus.max_documents}: "
            "lower it."
        )
    left = corpus.max_tokens
    documents, num_bytes = [], 0
    for row in rows.select(range(corpus.max_documents or len(rows))):
        text = row["text"] if left is None else cut(subject, row["text"], left)
        ids = subject.encode(text)
        if ids:
            documents.append(torch.tensor([subject.start, *ids]))
            num_bytes += len(text.encode("utf-8"))
        if left is not None and (left := left - len(ids)) <= 0:
            break
    if left is not None and left > 0:
        raise ValueError(
            f"{where} {corpus.name} has {corpus.max_tokens - left:,} tokens, fewer than max_tokens "
            f"{corpus.max_tokens:,}: lower it."
        )
    return Segment(corpus.name, documents, num_bytes)


def cut(subject: Subject, text: str, tokens: int) -> str:
    """The text of its first tokens. Encoded again, its end may be cut otherwise."""
    ends = subject.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text if len(ends) <= tokens else text[: ends[tokens - 1][1]]
