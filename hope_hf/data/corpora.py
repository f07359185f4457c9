"""The documents of one corpus of a mixture: loaded, filtered, split and limited."""

import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hope_hf.cli.process import warn_once

from .cache import writable_cache
from .fetched import Needed, fetch, missing_bytes
from .files import find_files, load_files, text_column
from .filters import keep
from .mixture import BUILTIN, Corpus
from .readers import kind_of
from .shard_manifest import KINDS, dtype_of
from .sources import builtin_corpus, load_data_set, split_training

_READ_TOGETHER = 100
_HELD_OUT_OF_A_STREAM = 256


@dataclass
class Documents:
    """Data sets with the one column `text`, in the order in which they are read."""

    corpus: Corpus
    train: Dataset
    validation: Dataset
    dropped: Counter
    """Documents that are not read, by reason."""


def open_corpus(
    corpus: Corpus,
    percentage: float,
    max_eval_samples: int | None,
    seed: int,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Documents:
    """Load what the corpus names; ValueError that names it where there is nothing to read, or less than asked for.

    percentage: of the documents that pass, held out for validation, of which the first `max_eval_samples` are read.
    tokenizer: counts the tokens of a stream up to its max_tokens.
    """
    train, validation, dropped = _split(corpus, percentage, needed_of(corpus, percentage, seed), tokenizer)
    if max_eval_samples is not None and len(validation) > max_eval_samples:
        dropped["max_eval_samples"] += len(validation) - max_eval_samples
        validation = validation.select(range(max_eval_samples))
    read = _drawn(corpus, len(train), seed)
    dropped["max_documents"] += len(train) - len(read)
    return Documents(corpus, train.select(read), validation, +dropped)


def needed_of(corpus: Corpus, percentage: float, seed: int) -> Needed:
    """What a training reads of a stream."""
    return Needed(seed, percentage, corpus.max_documents, corpus.max_tokens, held=1)


def held_out_documents(corpus: Corpus, percentage: float, count: int | None, seed: int) -> Dataset:
    """The first `count` documents that `open_corpus` holds out; of a stream no more is read than they need."""
    needed = Needed(seed, percentage, held=count or _HELD_OUT_OF_A_STREAM)
    _, validation, _ = _split(corpus, percentage, needed, None)
    return validation.select(range(min(len(validation), count or len(validation))))


def passing(
    corpus: Corpus,
    flag: str = "corpus",
    needed: Needed | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[Dataset, Counter]:
    """Its documents that pass its filters, and how many others there are, by reason.

    flag: what names the corpus in errors. needed: how much of a stream is read (default: all).
    """
    source = f"{flag} {corpus.name}"
    if corpus.streaming and needed is not None:
        documents = fetch(corpus, needed, tokenizer, f"{source}: {corpus.dataset_name}")
    else:
        documents = _load(corpus, source)
    kept, dropped = keep(_texts(documents), corpus.filters)
    if not kept:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        raise ValueError(
            f"{source} has no document to read ({reasons or 'it is empty'}): check its split and filters."
        )
    return documents.select(kept), dropped


def _split(
    corpus: Corpus, percentage: float, needed: Needed, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Dataset, Dataset, Counter]:
    documents, dropped = passing(corpus, needed=needed, tokenizer=tokenizer)
    return *split_training(documents, percentage, f"corpus {corpus.name}"), dropped


def require_as_many(corpus: Corpus, limit: str, count: int) -> None:
    """Raise ValueError where the corpus has fewer training documents or tokens than `limit`, the key, asks for."""
    asked = getattr(corpus, limit)
    if asked is not None and count < asked:
        kind = limit.removeprefix("max_")
        raise ValueError(f"corpus {corpus.name} has {count} training {kind}, fewer than {limit} {asked}: lower it.")


def warn_of_excess(corpus: Corpus, tokens: int) -> None:
    """Warn where far more tokens than `max_tokens` are read, since the document that makes the limit is read whole."""
    if corpus.max_tokens is not None and tokens > 1.1 * corpus.max_tokens:
        warn_once(
            f"corpus {corpus.name} gives {tokens:,} tokens where max_tokens is {corpus.max_tokens:,}: its last "
            "document is read whole."
        )


def check_cache(
    corpora: list[Corpus], percentage: float, seed: int, tokenizer: PreTrainedTokenizerBase, shards: Path | None = None
) -> None:
    """Raise ValueError where the cache's disk has less room than the streams will take.

    shards: a folder for their shards, which are counted where it is on the same disk.
    """
    streams = [corpus for corpus in corpora if corpus.streaming]
    needed = sum(missing_bytes(corpus, needed_of(corpus, percentage, seed), tokenizer) for corpus in streams)
    if not needed:
        return
    cache = writable_cache()
    if shards is not None and shards.stat().st_dev == cache.stat().st_dev:
        needed += KINDS[dtype_of(tokenizer)].itemsize * sum(corpus.max_tokens or 0 for corpus in corpora)
    free = shutil.disk_usage(cache).free
    if free < needed:
        raise ValueError(
            f"The cache {cache} has {free / 1e9:.1f} GB of free disk and the corpora that stream need about "
            f"{needed / 1e9:.1f} GB: free some, or name a folder on another disk in HF_DATASETS_CACHE."
        )


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
