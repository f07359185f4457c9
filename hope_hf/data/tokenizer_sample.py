"""The text that a tokenizer learns from, drawn from corpora by weight."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow.compute as pc
from datasets import Dataset

SEED = 0


@dataclass(frozen=True)
class Text:
    """One corpus, with the column `text`."""

    name: str
    documents: Dataset
    weight: float | None = None
    """None: by size."""
    most: int | None = None
    """Bytes that may be read of it."""

    @cached_property
    def size(self) -> int:
        """In bytes."""
        return text_bytes(self.documents)

    @property
    def readable(self) -> int:
        """Bytes that are there and may be read."""
        return self.size if self.most is None else min(self.size, self.most)


def sample(texts: list[Text], max_bytes: int) -> Iterator[str]:
    """Documents of all corpora with `max_bytes` together, of each in proportion to its weight, or all it has."""
    weights = [text.readable if text.weight is None else text.weight for text in texts]
    for text, weight in zip(texts, weights, strict=True):
        share = round(max_bytes * weight / (sum(weights) or 1))
        yield from drawn(text.documents, text.size, min(share, text.readable))


def drawn(documents: Dataset, size: int, max_bytes: int) -> Iterator[str]:
    """Documents with `max_bytes` together, in an order that is drawn, the same in every call; the last one is cut.

    size: bytes of all documents.
    """
    order = range(len(documents))
    if size > max_bytes:
        order = np.random.default_rng(SEED).permutation(len(documents))
    for index in order:
        text = documents[int(index)]["text"] or ""
        data = text.encode("utf-8", errors="replace")
        yield text if len(data) <= max_bytes else data[:max_bytes].decode("utf-8", errors="ignore")
        max_bytes -= len(data)
        if max_bytes <= 0:
            return


def text_bytes(documents: Dataset) -> int:
    """Bytes of all documents in UTF-8."""
    tables = documents.select_columns(["text"]).with_format("arrow").iter(100) if len(documents) else ()
    return sum(pc.sum(pc.binary_length(table["text"])).as_py() or 0 for table in tables)
