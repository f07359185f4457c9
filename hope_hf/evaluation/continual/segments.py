"""Segments of a stream: texts of a mixture file cut to their limits, or what a run holds out of each corpus."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hope_hf.data import Corpus, passing, read_mixture

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
    rows, _ = passing(corpus, where)
    if corpus.max_documents is not None and corpus.max_documents > len(rows):
        raise ValueError(
            f"{where} {corpus.name} has {len(rows)} documents, fewer than max_documents {corpus.max_documents}: "
            "lower it."
        )
    left = corpus.max_tokens
    texts = []
    for row in rows.select(range(corpus.max_documents or len(rows))):
        text = row["text"] if left is None else cut(subject, row["text"], left)
        texts.append(text)
        if left is not None and (left := left - len(subject.encode(text))) <= 0:
            break
    if left is not None and left > 0:
        raise ValueError(
            f"{where} {corpus.name} has {corpus.max_tokens - left:,} tokens, fewer than max_tokens "
            f"{corpus.max_tokens:,}: lower it."
        )
    return _segment(corpus.name, texts, subject)


def cut(subject: Subject, text: str, tokens: int) -> str:
    """The text of its first tokens. Encoded again, its end may be cut otherwise."""
    ends = subject.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    return text if len(ends) <= tokens else text[: ends[tokens - 1][1]]


def _segment(name: str, texts: list[str], subject: Subject) -> Segment:
    read = [(ids, len(text.encode("utf-8"))) for text in texts if (ids := subject.encode(text))]
    documents = [torch.tensor([subject.start, *ids]) for ids, _ in read]
    return Segment(name, documents, sum(num_bytes for _, num_bytes in read))


def _require_several(source: str, count: int) -> None:
    if count < 2:
        raise ValueError(f"{source} has one segment: forgetting needs two or more.")
