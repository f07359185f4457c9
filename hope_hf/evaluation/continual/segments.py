"""Segments of a stream: texts of a mixture file cut to their limits, or what a run holds out of each corpus."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hope_hf.data import Corpus, Needed, passing, read_mixture

from ..arguments import Arguments
from ..held_out import held_out_documents
from ..subject import Subject


@dataclass(frozen=True)
class Segment:
    """A text as documents [T] of token ids, each after a start token, and the bytes of all that is scored."""

    name: str
    documents: list[Tensor]
    num_bytes: int


def segment_opener(args: Arguments) -> Callable[[Subject], list[Segment]]:
    """What reads the segments, in their order, once there is a tokenizer.

    Those of `--segments`, or what a run holds out of each corpus of its `--dataset_mixture` or `--train_shards`.
    Raises ValueError where nothing names them, they cannot be read, or there are fewer than two.
    """
    if args.segments is not None:
        corpora = read_mixture(args.segments, "--segments")
        _require_several(f"--segments {args.segments}", len(corpora))
        for corpus in corpora:
            if corpus.shards:
                raise ValueError(
                    f"--segments {args.segments}, corpus {corpus.name}, has shards: name its text with files."
                )
        return lambda subject: [open_segment(args.segments, corpus, subject) for corpus in corpora]
    if not args.dataset_mixture and not args.train_shards:
        raise ValueError(
            "--suite continual needs --segments: name a file with a corpus for each segment, or the run's "
            "--dataset_mixture or --train_shards."
        )
    held = held_out_documents(args)
    names = list(dict.fromkeys(held.corpora))
    _require_several(held.source, len(names))
    parts = {
        name: [text for text, corpus in zip(held.texts, held.corpora, strict=True) if corpus == name] for name in names
    }
    return lambda subject: [_segment(name, texts, subject) for name, texts in parts.items()]


def open_segment(path: str, corpus: Corpus, subject: Subject) -> Segment:
    """Read a segment up to its max_documents and max_tokens, from its beginning.

    Raises ValueError where the text is shorter than a limit.
    """
    where = f"--segments {path}, corpus"
    needed = Needed(documents=corpus.max_documents, tokens=corpus.max_tokens)
    rows, _ = passing(corpus, where, needed, subject.tokenizer)
    if corpus.max_documents is not None and corpus.max_documents > len(rows):
        raise ValueError(
            f"{where} {corpus.name} has {len(rows)} documents, fewer than max_documents {corpus.max_documents}: "
            "lower it."
        )
    texts = (row["text"] for row in rows.select(range(corpus.max_documents or len(rows))))
    segment = _segment(corpus.name, texts, subject, corpus.max_tokens)
    read = sum(len(document) - 1 for document in segment.documents)
    if corpus.max_tokens is not None and read < corpus.max_tokens:
        raise ValueError(
            f"{where} {corpus.name} has {read:,} tokens, fewer than max_tokens {corpus.max_tokens:,}: lower it."
        )
    return segment


def cut(subject: Subject, text: str, tokens: int) -> str:
    """The text of its first tokens. Encoded again, its end may be cut otherwise."""
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    ends = subject.tokenizer(text, **options)["offset_mapping"]
    return text if len(ends) <= tokens else text[: ends[tokens - 1][1]]


def _segment(name: str, texts: Iterable[str], subject: Subject, most: int | None = None) -> Segment:
    """The texts one by one, until they have `most` tokens."""
    documents, num_bytes, left = [], 0, most
    for text in texts:
        part = text if left is None else cut(subject, text, left)
        ids = subject.encode(part)
        if ids:
            documents.append(torch.tensor([subject.start, *ids]))
            num_bytes += len(part.encode("utf-8"))
        if left is not None and (left := left - len(ids)) <= 0:
            break
    return Segment(name, documents, num_bytes)


def _require_several(source: str, count: int) -> None:
    if count < 2:
        raise ValueError(f"{source} has one segment: forgetting needs two or more.")
