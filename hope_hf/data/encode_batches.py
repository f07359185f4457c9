"""Documents to the tokens of shards, several of them together, in this process or in others."""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from multiprocessing import get_context

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hope_hf.cli.process import die_with_parent

from .encoding import Encode, make_encoder
from .shard_writer import Encoded
from .vocabulary import load_tokenizer

# Text that is encoded together: enough for all threads, little enough to wait for.
CHARACTERS = 1 << 20
_READ_TOGETHER = 8
_encode: Encode


class EncodingPool(ProcessPoolExecutor):
    """Processes that encode with the tokenizer saved in a folder."""

    def __init__(self, tokenizer_folder: str, count: int):
        super().__init__(count, get_context("spawn"), _begin, (tokenizer_folder,))
        self.count = count


def encoded(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, kind: np.dtype, pool: EncodingPool | None
) -> Iterator[Encoded]:
    """The tokens of all documents in their order, about 1 MB of text at a time.

    Raises ValueError where a process of the pool was killed.
    """
    batches = _batches(documents)
    if pool is None:
        encode = make_encoder(tokenizer)
        yield from (_pack(encode, texts, kind) for texts in batches)
        return
    waiting: deque = deque()
    try:
        for texts in batches:
            waiting.append(pool.submit(_work, texts, kind))
            # Enough to keep all busy; documents are not read further ahead than that.
            if len(waiting) > 2 * pool.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError(
            f"One of the {pool.count} processes of --num_proc was killed, as where memory is full: lower --num_proc, "
            "the same command goes on where it was."
        ) from None


def _batches(documents: Dataset) -> Iterator[list[str]]:
    texts, characters = [], 0
    for rows in documents.iter(_READ_TOGETHER):
        texts += rows["text"]
        characters += sum(map(len, rows["text"]))
        if characters >= CHARACTERS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _begin(tokenizer_folder: str) -> None:
    global _encode
    die_with_parent()
    _encode = make_encoder(load_tokenizer(tokenizer_folder))


def _work(texts: list[str], kind: np.dtype) -> Encoded:
    return _pack(_encode, texts, kind)


def _pack(encode: Encode, texts: Iterable[str], kind: np.dtype) -> Encoded:
    rows = encode(texts)
    lengths = list(map(len, rows))
    tokens = np.fromiter(chain.from_iterable(rows), dtype=kind, count=sum(lengths))
    return Encoded(tokens, lengths, [len(text.encode("utf-8", errors="surrogatepass")) for text in texts])
