"""Prepared shards: files of tokens that are read piece by piece, and the manifest that says what they are.

    shards/
      manifest.json         corpora, sizes, hashes, and what they were made with
      tokenizer/
      web/train-00000.bin   token ids one after another, uint16 or uint32, little-endian
      web/validation-00000.bin

A document begins at each EOS token; it may end in the next shard. `hope_hf.data.shard_writer` writes them.
"""

import bisect
import hashlib
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .config import DataConfig
from .encoding import document_start
from .packing import Block
from .shard_manifest import KINDS, MANIFEST, PARTS, TOKENIZER, read_manifest
from .vocabulary import check_vocabulary, highest_id, load_tokenizer, tokenizer_hash

# Read and hashed at the beginning of a run: seconds. Larger folders are checked by size, and by `prepare`.
_HASHED_AT_ONCE = 1 << 30
_READ_TOGETHER = 1 << 22
_AGAIN = "repeat the python -m hope_hf.data.prepare that wrote the folder, it mends what is broken"


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    path: Path
    tokens: int
    sha256: str


class ShardedStream:
    """The tokens of shards one after another; only what is read is loaded, and no file is kept open.

    length: tokens of the stream, if it ends before the last shard does.
    """

    def __init__(self, shards: Sequence[Shard], kind: np.dtype, eos: int, length: int | None = None):
        self._shards, self._kind, self._eos = list(shards), kind, eos
        self._highest = int(np.iinfo(kind).max)
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._length = sum(shard.tokens for shard in shards) if length is None else length

    @staticmethod
    def join(streams: Sequence["ShardedStream"]) -> "ShardedStream":
        """Whole streams of one folder, one after another."""
        return streams[0]._with([shard for stream in streams for shard in stream._shards], None)

    def __len__(self) -> int:
        return self._length

    def refuse_above(self, highest: int) -> None:
        """From now on a higher id, which the vocabulary lacks, is an error where it is read."""
        self._highest = highest

    def head(self, documents: int | None) -> "ShardedStream":
        """The first documents; all for None."""
        if documents is None:
            return self
        begun = 0
        for start in range(0, self._length, _READ_TOGETHER):
            begins = (self.read(start, start + _READ_TOGETHER) == self._eos).nonzero().flatten()
            if begun + len(begins) > documents:
                return self._with(self._shards, start + int(begins[documents - begun]))
            begun += len(begins)
        return self

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop-1 as int64, fewer at the end of the stream.

        Raises ValueError that names the shard where it has become unreadable or shorter, or has a wrong id.
        """
        stop = min(stop, self._length)
        parts = []
        index = bisect.bisect_right(self._ends, start)
        while start < stop:
            shard = self._shards[index]
            begin = self._ends[index] - shard.tokens
            part = self._read_shard(shard, start - begin, min(stop - begin, shard.tokens))
            parts.append(torch.from_numpy(part.astype(np.int64)))
            start += len(part)
            index += 1
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def block(self, start: int, length: int) -> Block:
        """The `length` tokens from `start` on, fewer at the end of the stream."""
        tokens = self.read(start, start + length)
        return Block(tokens, (tokens == self._eos).nonzero().flatten())

    def digest(self) -> str:
        """A hash of the tokens, from those of the shards."""
        parts = repr(([shard.sha256 for shard in self._shards], self._length))
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()

    def _read_shard(self, shard: Shard, start: int, stop: int) -> np.ndarray:
        # Read, not mapped: a map keeps a descriptor for each of a thousand shards, and a file that was cut meanwhile
        # would kill the process.
        try:
            part = np.fromfile(shard.path, self._kind, stop - start, offset=start * self._kind.itemsize)
        except OSError as error:
            raise ValueError(f"The shard {shard.path} cannot be read any more: {error.strerror}.") from error
        if len(part) < stop - start:
            raise ValueError(f"The shard {shard.path} was cut while it was in use: {_AGAIN}.")
        # About a microsecond for a block, where a pass over all shards would take minutes.
        if len(part) and part.max() > self._highest:
            raise ValueError(
                f"The shard {shard.path} holds the id {part.max()}, and the tokenizer's ids end at {self._highest}: "
                "prepare the shards again."
            )
        return part

    def _with(self, shards: list[Shard], length: int | None) -> "ShardedStream":
        stream = ShardedStream(shards, self._kind, self._eos, length)
        stream.refuse_above(self._highest)
        return stream


@dataclass(frozen=True)
class ShardedCorpus:
    """One corpus of a folder of shards."""

    name: str
    train: ShardedStream
    validation: ShardedStream
    weight: float | None


@dataclass(frozen=True)
class ShardFolder:
    """A whole folder of shards, checked."""

    path: Path
    flag: str
    manifest: dict
    corpora: list[ShardedCorpus]

    def tokenizer(self, config: DataConfig) -> PreTrainedTokenizerBase:
        """That of `--tokenizer_name`, which must be the shards' own, or the one in the folder."""
        name = config.tokenizer_name or str(self.path / TOKENIZER)
        tokenizer = load_tokenizer(name, config.trust_remote_code)
        self.check_tokenizer(tokenizer)
        if config.vocab_size is not None:
            check_vocabulary(tokenizer, config.vocab_size)
        return tokenizer

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError where the shards were made with another tokenizer; from now on its ids alone are read."""
        if tokenizer_hash(tokenizer) != self.manifest["tokenizer"]["sha256"]:
            raise ValueError(
                f"{self.flag} {self.path} was made with another tokenizer than {tokenizer.name_or_path}: pass "
                f"--tokenizer_name {self.path / TOKENIZER}, or prepare the shards again."
            )
        eos = self.manifest["eos_token_id"]
        start = document_start(tokenizer)
        if eos != start:
            raise ValueError(
                f"{self.flag} {self.path / MANIFEST} has eos_token_id {eos}, and the tokenizer begins documents with "
                f"{start}: prepare the shards again."
            )
        highest = highest_id(tokenizer)
        for corpus in self.corpora:
            corpus.train.refuse_above(highest)
            corpus.validation.refuse_above(highest)


def open_folder(path: str, flag: str) -> ShardFolder:
    """Read the manifest and check that every shard is there. Raises ValueError that names the flag and the file."""
    folder = Path(path)
    manifest = read_manifest(folder, flag)
    kind, eos = KINDS[manifest["dtype"]], manifest["eos_token_id"]
    corpora = [
        ShardedCorpus(
            name,
            *(ShardedStream(_shards(folder, corpus[part]), kind, eos) for part in PARTS),
            corpus["weight"],
        )
        for name, corpus in manifest["corpora"].items()
    ]
    shards = [shard for part in _parts(manifest) for shard in _shards(folder, part)]
    for shard in shards:
        _check_size(shard, kind, folder, flag)
    if sum(shard.tokens for shard in shards) * kind.itemsize <= _HASHED_AT_ONCE:
        for shard in shards:
            _check_hash(shard, flag)
    return ShardFolder(folder, flag, manifest, corpora)


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(shard: Shard, flag: str) -> None:
    if file_hash(shard.path) != shard.sha256:
        raise ValueError(f"{flag}: {shard.path} has changed since it was written (SHA-256): {_AGAIN}.")


def _check_size(shard: Shard, kind: np.dtype, folder: Path, flag: str) -> None:
    try:
        status = shard.path.stat()
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ValueError(f"{flag}: {shard.path} {reason}: {_AGAIN}.") from None
    inside = Path(os.path.realpath(shard.path)).is_relative_to(os.path.realpath(folder))
    if not inside or not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{flag}: {shard.path} is no file of the folder's own, but a link, pipe or folder: {_AGAIN}.")
    size, expected = status.st_size, shard.tokens * kind.itemsize
    if size != expected:
        raise ValueError(f"{flag}: {shard.path} has {size} bytes instead of {expected}: {_AGAIN}.")


def _parts(manifest: dict) -> Iterator[dict]:
    for corpus in manifest["corpora"].values():
        yield from (corpus[part] for part in PARTS)


def _shards(folder: Path, part: dict) -> list[Shard]:
    return [Shard(folder / shard["file"], shard["tokens"], shard["sha256"]) for shard in part["shards"]]
