"""The text that a tokenizer learns from: a sample of several corpora, and how well the tokenizer fits each."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hope_hf.common.flags import as_list
from hope_hf.common.process import warn_once

from .corpora import BYTES_PER_TOKEN, Needed, passing
from .encoding import plain_ids
from .file_names import find_files
from .files import load_files
from .mixture import Corpus, read_mixture
from .tokenizer import Arguments

SEED = 0


@dataclass(frozen=True)
class Text:
    """One corpus, with the column `text`."""

    name: str
    documents: Dataset
    weight: float | None = None
    """None: the corpus counts by its size."""
    most: int | None = None
    """Bytes of the corpus that may be read; None: all."""

    @cached_property
    def size(self) -> int:
        """Size in bytes."""
        return text_bytes(self.documents)

    @property
    def readable(self) -> int:
        """Number of bytes that exist and may be read."""
        return self.size if self.most is None else min(self.size, self.most)


def sample(texts: list[Text], max_bytes: int) -> Iterator[str]:
    """Documents of all corpora, `max_bytes` in total, each corpus in proportion to its weight or read whole."""
    weights = [text.readable if text.weight is None else text.weight for text in texts]
    for text, weight in zip(texts, weights, strict=True):
        share = round(max_bytes * weight / (sum(weights) or 1))
        yield from drawn(text.documents, text.size, min(share, text.readable))


def drawn(documents: Dataset, size: int, max_bytes: int) -> Iterator[str]:
    """Documents of `max_bytes` in total, in a random order that is the same in every call; the last one is cut.

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


def text_bytes(documents: Dataset, digest: "hashlib.blake2b | None" = None) -> int:
    """Bytes of all documents in UTF-8; `digest` is updated with them, in their order."""
    size = 0
    if len(documents):
        for table in documents.select_columns(["text"]).with_format("arrow").iter(100):
            texts = table["text"].combine_chunks()
            size += pc.sum(pc.binary_length(texts)).as_py() or 0
            if digest is not None:
                together = pa.ListArray.from_arrays([0, len(texts)], pc.fill_null(texts, ""))
                digest.update(pc.binary_join(together, "\0")[0].as_buffer())
    return size


# Bytes of each corpus that are measured.
_BYTES = 1_000_000


def report_on(tokenizer: PreTrainedTokenizerBase, texts: list[Text]) -> dict:
    """JSON-able: bytes per token, unknown tokens and exact round trips on 1 MB of each corpus; special tokens."""
    corpora = {}
    total_bytes = 0
    total_tokens = 0
    for text in texts:
        facts = _measure(tokenizer, list(drawn(text.documents, text.size, _BYTES)))
        corpora[text.name] = facts
        total_bytes += facts["bytes"]
        total_tokens += facts["tokens"]
    return {
        "vocab_size": len(tokenizer),
        "bytes_per_token": total_bytes / total_tokens,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "corpora": corpora,
    }


def _measure(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict:
    size = 0
    tokens = 0
    unknown_tokens = 0
    exact_round_trips = 0
    for text in texts:
        ids = plain_ids(tokenizer, text)
        size += len(text.encode())
        tokens += len(ids)
        if tokenizer.unk_token:
            unknown_tokens += ids.count(tokenizer.unk_token_id)
        exact_round_trips += tokenizer.decode(ids) == text
    return {
        "bytes": size,
        "tokens": tokens,
        "bytes_per_token": size / max(1, tokens),
        "unknown_tokens": unknown_tokens,
        "exact_round_trips": exact_round_trips,
        "documents": len(texts),
    }


def read_texts(args: Arguments) -> list[Text]:
    """The text that the flags name, of one source; ValueError for a corpus without text."""
    if args.files:
        options = {"column": args.text_column, "on_bad_rows": args.on_bad_rows}
        texts = []
        files_before = set()
        for name in as_list(args.files):
            files = {os.path.realpath(path): path for path in find_files(name, "--files")}
            new_files = [path for file, path in files.items() if file not in files_before]
            files_before.update(files)
            if new_files:
                texts.append(Text(name, load_files(new_files, "--files", **options)))
        return texts
    if args.dataset_name:
        corpus = Corpus(args.dataset_name, args.dataset_name, args.dataset_config_name, text_column=args.text_column)
        return [Text(args.dataset_name, passing(corpus, "--dataset_name")[0])]
    corpora = read_mixture(args.dataset_mixture, "--dataset_mixture")
    for corpus in corpora:
        if corpus.shards:
            raise ValueError(
                f"--dataset_mixture {args.dataset_mixture}, corpus {corpus.name}, has no text: leave it out."
            )
    return [_text(corpus, args.max_bytes) for corpus in corpora]


def _text(corpus: Corpus, max_bytes: int) -> Text:
    """A corpus up to its limits; without a tokenizer, tokens are estimated from their usual number of bytes."""
    most = None if corpus.max_tokens is None else BYTES_PER_TOKEN * corpus.max_tokens
    size = max_bytes if most is None else min(max_bytes, most)
    documents, _ = passing(corpus, needed=Needed(SEED, size=size, most_documents=corpus.max_documents))
    if corpus.max_documents is not None:
        count = min(corpus.max_documents, len(documents))
        order = np.random.default_rng(SEED).permutation(len(documents))
        documents = documents.select(order[:count])
    return Text(corpus.name, documents, corpus.weight, most)


def warn_of_neglect(bytes_per_token: dict[str, float]) -> None:
    """Warn of corpora, by name with their bytes per token, that take twice the tokens of the best one."""
    best = max(bytes_per_token, key=bytes_per_token.get)
    for name, value in bytes_per_token.items():
        if 2 * value <= bytes_per_token[best]:
            warn_once(
                f"{name} has {value:.2f} bytes per token, {best} {bytes_per_token[best]:.2f}: its text takes twice "
                "the tokens or more, give it a larger weight or the tokenizer more entries."
            )
