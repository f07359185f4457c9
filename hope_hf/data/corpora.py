"""The documents of one corpus of a mixture: loaded, filtered, split and limited."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from .files import find_files, load_files, text_column
from .filters import keep
from .mixture import BUILTIN, Corpus
from .readers import kind_of
from .sources import builtin_corpus, load_data_set, split_training

_READ_TOGETHER = 100


@dataclass
class Documents:
    """Data sets with the one column `text`, in the order in which they are read."""

    corpus: Corpus
    train: Dataset
    validation: Dataset
    dropped: Counter
    """Documents that are not read, by reason."""


def open_corpus(corpus: Corpus, percentage: float, max_eval_samples: int | None, seed: int) -> Documents:
    """Load what the corpus names; ValueError that names it where there is nothing to read, or less than asked for.

    percentage: of the documents that pass, held out for validation, of which the first `max_eval_samples` are read.
    """
    documents, dropped = passing(corpus)
    train, validation = split_training(documents, percentage, f"corpus {corpus.name}")
    if max_eval_samples is not None and len(validation) > max_eval_samples:
        dropped["max_eval_samples"] += len(validation) - max_eval_samples
        validation = validation.select(range(max_eval_samples))
    read = _drawn(corpus, len(train), seed)
    dropped["max_documents"] += len(train) - len(read)
    return Documents(corpus, train.select(read), validation, +dropped)


def passing(corpus: Corpus, flag: str = "corpus") -> tuple[Dataset, Counter]:
    """Its documents that pass its filters, and how many others there are, by reason.

    flag: what names the corpus in errors.
    """
    source = f"{flag} {corpus.name}"
    documents = _load(corpus, source)
    kept, dropped = keep(_texts(documents), corpus.filters)
    if not kept:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        raise ValueError(
            f"{source} has no document to read ({reasons or 'it is empty'}): check its split and filters."
        )
    return documents.select(kept), dropped


def require_as_many(corpus: Corpus, limit: str, count: int) -> None:
    """Raise ValueError where the corpus has fewer training documents or tokens than `limit`, the key, asks for."""
    asked = getattr(corpus, limit)
    if asked is not None and count < asked:
        kind = limit.removeprefix("max_")
        raise ValueError(f"corpus {corpus.name} has {count} training {kind}, fewer than {limit} {asked}: lower it.")


def _load(corpus: Corpus, source: str) -> Dataset:
    if corpus.files:
        paths = find_files(corpus.files, f"{source}: files")
        if corpus.text_column and kind_of(paths[0]) == "text":
            raise ValueError(f"{source} has text_column, and {paths[0]} has no columns: leave it out.")
        return load_files(paths, f"{source}: files", column=corpus.text_column)
    if corpus.dataset_name == BUILTIN:
        return builtin_corpus()
    name = f"{source}: {corpus.dataset_name}"
    dataset = load_data_set(
        f"{name} (split {corpus.split})",
        corpus.dataset_name,
        corpus.dataset_config_name,
        data_dir=corpus.data_dir,
        split=corpus.split,
    )
    return text_column(dataset, name, corpus.text_column)


def _texts(documents: Dataset):
    for rows in documents.select_columns(["text"]).iter(_READ_TOGETHER):
        yield from rows["text"]


def _drawn(corpus: Corpus, count: int, seed: int):
    """Indices of the documents to read of `count`: all in order where there is no limit."""
    if corpus.max_documents is None and corpus.max_tokens is None:
        return range(count)
    require_as_many(corpus, "max_documents", count)
    # By name, too: two corpora of one size must not be drawn alike.
    drawn = np.random.default_rng([seed, *corpus.name.encode()]).permutation(count)
    return drawn[: corpus.max_documents]
