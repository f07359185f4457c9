"""The documents of one corpus of a mixture: loaded or fetched from a stream, filtered, split and limited."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
from datasets import Dataset, IterableDataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hope_hf.common.files import free_disk
from hope_hf.common.process import warn_once

from .cache import cache_path, cached_texts, files_under, writable_cache
from .documents import HELD_OUT_OF_A_STREAM, builtin_corpus, held_out, load_data_set, split_training
from .encoding import make_encoder
from .file_names import find_files
from .files import load_files, read_stream, text_column
from .mixture import BUILTIN, Corpus, Judge, keep
from .packing import stable_seed
from .shards import KINDS, dtype_of
from .vocabulary import tokenizer_hash

# Bytes of text per token: an upper bound for most tokenizers.
BYTES_PER_TOKEN = 5
# Documents that are shuffled together; the order of the data set's files is shuffled, too.
_SHUFFLED = 1_000
_READ_TOGETHER = 100
# The first `_TOKENIZED` documents are tokenized, then one in `_SAMPLED`; `_SURPLUS` covers the estimate's error.
_TOKENIZED, _SAMPLED, _SURPLUS = 1_000, 16, 1.02


@dataclass(frozen=True)
class Needed:
    """How much of a stream is read, counted in documents that pass the corpus's filters.

    After `most_documents` of them reading stops in any case.
    """

    seed: int | None = None
    """Seed of the order; None keeps the data set's order."""
    percentage: float = 0.0
    """Percentage of the documents that is held out."""
    documents: int | None = None
    """Training documents to read."""
    tokens: int | None = None
    """Training tokens to read."""
    size: int | None = None
    """Bytes of training documents to read."""
    held: int = 0
    """Held-out documents to read."""
    most_documents: int | None = None


def _identity(corpus: Corpus, needed: Needed, tokenizer: PreTrainedTokenizerBase | None) -> tuple[list[str], tuple]:
    """The `files` and `what` of `cached_texts`; the tokenizer matters only if a number of tokens is needed."""
    counted_by = tokenizer_hash(tokenizer) if needed.tokens is not None else None
    return files_under(corpus.dataset_name), (replace(corpus, weight=None), needed, counted_by)


def _text_of(corpus: Corpus, name: str, **options) -> Dataset | IterableDataset:
    """The text of the corpus's data set; `name`: what errors call it."""
    dataset = load_data_set(
        f"{name} (split {corpus.split})",
        corpus.dataset_name,
        corpus.dataset_config_name,
        data_dir=corpus.data_dir,
        split=corpus.split,
        **options,
    )
    return text_column(dataset, name, corpus.text_column)


def _fetched(corpus: Corpus, needed: Needed, tokenizer, name: str) -> Iterator[pa.Array]:
    """All documents that are read, including those that do not pass."""
    stream = _text_of(corpus, name, streaming=True)
    if needed.seed is not None:
        # The name is part of the seed: two corpora of one data set must not be drawn alike.
        seed = stable_seed(needed.seed, *corpus.name.encode()) % 2**32
        stream = stream.shuffle(seed=seed, buffer_size=_SHUFFLED)
    count = _Count(corpus, needed, tokenizer)
    rows = read_stream(stream, name)
    with tqdm(unit="B", unit_scale=True, desc=f"Fetching {corpus.name}", disable=None) as bar:
        while not count.is_enough:
            texts = []
            for row in islice(rows, _READ_TOGETHER):
                texts.append(row["text"])
                count.add(row["text"])
                if count.is_enough:
                    break
            if not texts:
                return
            bar.update(sum(len(text or "") for text in texts))
            yield pa.array(texts, pa.string())


class _Count:
    """Counts the documents read so far, their bytes and tokens."""

    def __init__(self, corpus: Corpus, needed: Needed, tokenizer: PreTrainedTokenizerBase | None):
        self._needed = needed
        self._encode = make_encoder(tokenizer) if needed.tokens is not None else None
        self._judge = Judge(corpus)
        self._documents = 0
        self._held = 0
        # Bytes of all training documents; bytes and tokens of those that are tokenized.
        self._size = 0
        self._sampled_size = 0
        self._sampled_tokens = 0

    @property
    def is_enough(self) -> bool:
        """Whether all that is needed has been read."""
        needed = self._needed
        if self._documents == needed.most_documents:
            return True
        tokens = self._sampled_tokens * self._size / max(1, self._sampled_size)
        return (
            self._held >= needed.held
            and self._documents >= (needed.documents or 0)
            and self._size >= (needed.size or 0)
            and tokens >= _SURPLUS * (needed.tokens or 0)
        )

    def add(self, text: str | None) -> None:
        """Count a document."""
        if self._judge.reason(text) is not None:
            return
        if held_out(text, self._needed.percentage):
            self._held += 1
            return
        size = len(text.encode("utf-8", errors="surrogatepass"))
        self._size += size
        if self._encode and (self._documents < _TOKENIZED or self._documents % _SAMPLED == 0):
            self._sampled_size += size
            self._sampled_tokens += sum(map(len, self._encode([text])))
        self._documents += 1


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
    """Load a corpus. Raises ValueError that names it if it has nothing to read, or less than its limits require.

    percentage: share of the passing documents held out for validation; the first `max_eval_samples` of them are read.
    tokenizer: counts the tokens of a stream up to its max_tokens.
    """
    needed = needed_of(corpus, percentage, seed)
    train, validation, dropped = _split(corpus, percentage, needed, tokenizer)
    if max_eval_samples is not None and len(validation) > max_eval_samples:
        dropped["max_eval_samples"] += len(validation) - max_eval_samples
        validation = validation.select(range(max_eval_samples))
    read = _drawn(corpus, len(train), seed)
    dropped["max_documents"] += len(train) - len(read)
    return Documents(corpus, train.select(read), validation, +dropped)


def needed_of(corpus: Corpus, percentage: float, seed: int) -> Needed:
    """How much of a stream a training run reads."""
    return Needed(seed, percentage, corpus.max_documents, corpus.max_tokens, held=1)


def held_out_documents(corpus: Corpus, percentage: float, count: int | None, seed: int) -> Dataset:
    """The first `count` documents that `open_corpus` holds out; a stream is read only until it has given them."""
    needed = Needed(seed, percentage, held=count or HELD_OUT_OF_A_STREAM)
    _, validation, _ = _split(corpus, percentage, needed, None)
    return validation.select(range(min(len(validation), count or len(validation))))


def passing(
    corpus: Corpus,
    flag: str = "corpus",
    needed: Needed | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> tuple[Dataset, Counter]:
    """The documents of a corpus that pass its filters, and the number of dropped ones by reason.

    flag: what names the corpus in errors. needed: how much of a stream is read (default: all).
    """
    source = f"{flag} {corpus.name}"
    if corpus.streaming and needed is not None:
        files, what = _identity(corpus, needed, tokenizer)
        texts = _fetched(corpus, needed, tokenizer, f"{source}: {corpus.dataset_name}")
        documents = cached_texts(files, what, texts)
    else:
        documents = _load(corpus, source)
    kept, dropped = keep(_texts(documents), corpus)
    if not kept:
        reasons = ", ".join(f"{reason} {count}" for reason, count in dropped.items())
        raise ValueError(
            f"{source} has no document to read ({reasons or 'it is empty'}): check its split and filters."
        )
    return documents.select(kept), dropped


def _texts(documents: Dataset) -> Iterator[str | None]:
    for rows in documents.select_columns(["text"]).iter(_READ_TOGETHER):
        yield from rows["text"]


def _split(
    corpus: Corpus, percentage: float, needed: Needed, tokenizer: PreTrainedTokenizerBase | None
) -> tuple[Dataset, Dataset, Counter]:
    documents, dropped = passing(corpus, needed=needed, tokenizer=tokenizer)
    return *split_training(documents, percentage, f"corpus {corpus.name}"), dropped


def require_as_many(corpus: Corpus, limit: str, count: int) -> None:
    """Raise ValueError if the corpus has fewer training documents or tokens than its key `limit` sets."""
    value = getattr(corpus, limit)
    if value is not None and count < value:
        kind = limit.removeprefix("max_")
        raise ValueError(f"corpus {corpus.name} has {count} training {kind}, fewer than {limit} {value}: lower it.")


def warn_of_excess(corpus: Corpus, tokens: int) -> None:
    """Warn if far more tokens than `max_tokens` are read, since the document that reaches the limit is read whole."""
    if corpus.max_tokens is not None and tokens > 1.1 * corpus.max_tokens:
        warn_once(
            f"corpus {corpus.name} gives {tokens:,} tokens, more than max_tokens {corpus.max_tokens:,}: its last "
            "document is read whole."
        )


def check_cache(
    corpora: list[Corpus], percentage: float, seed: int, tokenizer: PreTrainedTokenizerBase, shards: Path | None = None
) -> None:
    """Raise ValueError if the cache's disk has less room than the streams will take.

    shards: the folder for their shards, whose size counts if it is on the same disk.
    """
    needed = 0
    for corpus in corpora:
        if corpus.streaming and corpus.max_tokens is not None:
            files, what = _identity(corpus, needed_of(corpus, percentage, seed), tokenizer)
            if not cache_path(files, what).exists():
                needed += BYTES_PER_TOKEN * corpus.max_tokens
    if not needed:
        return
    cache = writable_cache()
    if shards is not None and shards.stat().st_dev == cache.stat().st_dev:
        tokens = sum(corpus.max_tokens or 0 for corpus in corpora)
        needed += KINDS[dtype_of(tokenizer)].itemsize * tokens
    free = free_disk(cache)
    if free is not None and free < needed:
        raise ValueError(
            f"The cache {cache} has {free / 1e9:.1f} GB of free disk and the streamed corpora need about "
            f"{needed / 1e9:.1f} GB: free some, or name a folder on another disk in HF_DATASETS_CACHE."
        )


def _load(corpus: Corpus, source: str) -> Dataset:
    if corpus.files:
        flag = f"{source}: files"
        paths = find_files(corpus.files, flag)
        return load_files(paths, flag, column=corpus.text_column, on_bad_rows=corpus.on_bad_rows)
    if corpus.dataset_name == BUILTIN:
        return builtin_corpus()
    return _text_of(corpus, f"{source}: {corpus.dataset_name}")


def _drawn(corpus: Corpus, count: int, seed: int):
    """Indices of the documents to read, out of `count`; all in order if there is no limit."""
    if corpus.max_documents is None and corpus.max_tokens is None:
        return range(count)
    require_as_many(corpus, "max_documents", count)
    # The name is part of the seed: two corpora of one size must not be drawn alike.
    drawn = np.random.default_rng([seed, *corpus.name.encode()]).permutation(count)
    return drawn[: corpus.max_documents]
