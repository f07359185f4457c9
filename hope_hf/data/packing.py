"""Documents to tokens, tokens to blocks of one length, blocks to batches.

Every document is preceded by the EOS token, where its positions start again (or by the BOS token of a tokenizer that
puts one before prompts, see `hope_hf.data.encoding`):

    tokens     <eos> a0 a1 a2 <eos> b0 b1 ...
    positions    0    1  2  3   0    1  2 ...

A model whose memories restart at <eos> still learns both ends: a2 predicts <eos> from its own document, and <eos>
predicts b0 from a fresh memory, as generation from an empty prompt and evaluation harnesses do. No target is masked.
Chats (`hope_hf.data.chats`) are packed as their template writes them, and only the assistant's tokens are predicted.

Blocks are consecutive runs of `block_size` tokens. A block that begins inside a document is read from a fresh memory
(its positions start at 0), unless boundaries are carried.

A batch: `input_ids` and `labels` int64 [B, T] (labels not shifted; -100 in the padding of the last validation
block, and for tokens that are not learned), and with document_boundary "reset" `position_ids` int64 [B, T].
"""

import bisect
import hashlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from datasets import Dataset, Features, Value
from datasets import List as ListFeature
from torch import Tensor

from hope_hf.common.program import lines_of_datasets
from hope_hf.common.results import IGNORED

from .cache import cache_errors
from .encoding import Encode

_BAR = "Tokenizing"
# Bytes of text that are tokenized together.
_READ_TOGETHER = 1 << 21
# Tokens that are counted together, since numpy copies them to int64.
_COUNTED_TOGETHER = 1 << 20


@dataclass
class Block:
    tokens: Tensor
    """int64 [T]: token ids, and `~id` for a token that is read and not predicted."""
    starts: Tensor
    """int64 [n]: positions in the block where documents begin."""


def tokenize(documents: Dataset, encode: Encode, num_workers: int | None = None) -> "TokenStream":
    """All documents as one stream of tokens.

    encode: made by `make_encoder`, or another function from texts to token lists.

    Raises ValueError if one of the processes is killed or the cache cannot be written.
    """
    bytes_per_row = documents.data.nbytes / max(1, documents.data.num_rows)
    try:
        with cache_errors(), lines_of_datasets(_BAR):
            tokens = documents.map(
                lambda rows: {"input_ids": encode(rows["text"])},
                batched=True,
                # Documents may be long: those that are read together must fit into memory.
                batch_size=min(1_000, max(1, int(_READ_TOGETHER / max(1, bytes_per_row)))),
                num_proc=num_workers,
                remove_columns=documents.column_names,
                features=Features({"input_ids": ListFeature(Value("int32"))}),
                desc=_BAR,
            )
    except RuntimeError as error:
        # datasets has no error type of its own for a killed process.
        if "abruptly died" not in str(error):
            raise
        raise ValueError(
            f"One of the {num_workers} processes of --preprocessing_num_workers was killed, perhaps out of memory: "
            "lower it."
        ) from None
    return TokenStream(tokens)


class Stream:
    """The tokens of documents one after another, stored in parts; only the requested tokens are read."""

    def __init__(self, sizes: Sequence[int]):
        self._ends = list(accumulate(sizes))
        self._length = self._ends[-1] if self._ends else 0

    def __len__(self) -> int:
        return self._length

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop-1 as int64, fewer at the end of the stream."""
        stop = min(stop, self._length)
        index = bisect.bisect_right(self._ends, start)
        tokens = [np.zeros(0, np.int64)]
        while start < stop:
            begin = self._ends[index - 1] if index else 0
            end = min(stop, self._ends[index])
            part = self._read_part(index, start - begin, end - begin)
            tokens.append(part.astype(np.int64))
            start += len(part)
            index += 1
        return torch.from_numpy(np.concatenate(tokens))

    @abstractmethod
    def _read_part(self, index: int, start: int, stop: int) -> np.ndarray:
        """Tokens start..stop-1 of a part."""


class TokenStream(Stream):
    """The tokens of a data set of token lists, which stay on disk if the data set is there."""

    def __init__(self, documents: Dataset):
        self._documents = documents
        self._parts = []
        lengths = []
        if len(documents):
            for column in documents.data.column("input_ids").chunks:
                self._parts.append(column.flatten().to_numpy())
                lengths.append(column.value_lengths().to_numpy())
        super().__init__(list(map(len, self._parts)))
        ends = np.concatenate([[0], *lengths]).astype(np.int64).cumsum()
        self.starts = torch.from_numpy(ends[:-1])
        """int64 [documents]: position of every document's EOS."""

    def longer_than(self, tokens: int) -> int:
        """How many documents have more than so many tokens."""
        end_of_last = torch.tensor([len(self)])
        ends = torch.cat([self.starts[1:], end_of_last])
        lengths = ends - self.starts
        return int((lengths > tokens).sum())

    def changed(self, change: Callable[[list[list[int]]], list[list[int]]]) -> "TokenStream":
        """The tokens of the documents that `change` makes of some documents together."""
        with cache_errors():
            return TokenStream(
                self._documents.map(lambda rows: {"input_ids": change(rows["input_ids"])}, batched=True)
            )

    def head(self, documents: int) -> "TokenStream":
        """The tokens of the first documents."""
        return TokenStream(self._documents.select(range(documents)))

    def block(self, start: int, length: int) -> Block:
        """The `length` tokens from `start` on, fewer at the end of the stream."""
        end = start + length
        edges = torch.tensor([start, end])
        first, last = torch.searchsorted(self.starts, edges).tolist()
        return Block(self.read(start, end), self.starts[first:last] - start)

    def digest(self) -> str:
        """A hash of the tokens, the same for the same text and tokenizer wherever it is stored."""
        state = hashlib.blake2b(digest_size=16)
        for part in self._parts:
            state.update(part)
        return state.hexdigest()

    def count(self, size: int) -> Tensor:
        """How often each of `size` tokens occurs where it is predicted, int64 [size]."""
        counts = np.zeros(size, np.int64)
        for part in self._parts:
            for start in range(0, len(part), _COUNTED_TOGETHER):
                tokens = part[start : start + _COUNTED_TOGETHER]
                counts += np.bincount(tokens[tokens >= 0], minlength=size)
        return torch.from_numpy(counts)

    def _read_part(self, index: int, start: int, stop: int) -> np.ndarray:
        return self._parts[index][start:stop]


@dataclass(frozen=True)
class CorpusTokens:
    """The tokens of one corpus; `weight`: its share of the training tokens relative to the others', None: its size."""

    name: str
    train: Stream
    validation: Stream
    weight: float | None


class Indexed(Sequence):
    """A sequence of `count` items, each made by `_make` when it is read."""

    def __init__(self, count: int):
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int):
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._make(index)


class TokenBlocks(Indexed):
    """A stream cut into blocks of `block_size` tokens; the incomplete last one only with `keep_last`."""

    def __init__(self, stream: Stream, block_size: int, keep_last: bool = False):
        length = len(stream) + block_size - 1 if keep_last else len(stream)
        super().__init__(length // block_size)
        self.stream, self.block_size = stream, block_size

    def _make(self, index: int) -> Block:
        return self.stream.block(index * self.block_size, self.block_size)


class RandomBlocks(Indexed):
    """Blocks of uniformly random tokens: the same for the same seed and index."""

    def __init__(self, count: int, block_size: int, vocab_size: int, seed: int):
        super().__init__(count)
        self.block_size, self.vocab_size, self.seed = block_size, vocab_size, seed

    def _make(self, index: int) -> Block:
        generator = torch.Generator().manual_seed(stable_seed(self.seed, index))
        tokens = torch.randint(self.vocab_size, (self.block_size,), generator=generator)
        return Block(tokens, torch.zeros(1, dtype=torch.int64))


class JoinedBlocks(Indexed):
    """The blocks of several sequences, one sequence after another."""

    def __init__(self, sequences: Sequence[Sequence[Block]]):
        self._sequences = sequences
        self._ends = list(accumulate(map(len, sequences)))
        super().__init__(self._ends[-1])

    def _make(self, index: int) -> Block:
        which = bisect.bisect_right(self._ends, index)
        begin = self._ends[which] - len(self._sequences[which])
        return self._sequences[which][index - begin]


def collate(blocks: list[Block], block_size: int, padding: int, restart: bool) -> dict[str, Tensor]:
    """A batch of blocks; a short one is filled with `padding`, which is not predicted."""
    input_ids = torch.full((len(blocks), block_size), padding)
    labels = torch.full((len(blocks), block_size), IGNORED)
    begins = torch.zeros(len(blocks), block_size, dtype=torch.bool)
    for row, block in enumerate(blocks):
        predicted = block.tokens >= 0
        input_ids[row, : len(block.tokens)] = torch.where(predicted, block.tokens, ~block.tokens)
        labels[row, : len(block.tokens)] = torch.where(predicted, block.tokens, IGNORED)
        begins[row, block.starts] = True
    batch = {"input_ids": input_ids, "labels": labels}
    if restart:
        column = torch.arange(block_size).expand_as(begins)
        batch["position_ids"] = column - torch.where(begins, column, 0).cummax(dim=1).values
    return batch


def stable_seed(*parts: int) -> int:
    """One seed from several numbers, so that neither (seed, epoch) nor (seed, row) pairs collide by addition."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
