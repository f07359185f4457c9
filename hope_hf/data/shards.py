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
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hope_hf.cli.files import is_inside

from .config import DataConfig
from .packing import Block
from .vocabulary import check_vocabulary, load_tokenizer, tokenizer_hash

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
FORMAT = 1
KINDS = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
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
        self._ends = list(accumulate(shard.tokens for shard in shards))
        self._length = sum(shard.tokens for shard in shards) if length is None else length

    @staticmethod
    def join(streams: Sequence["ShardedStream"]) -> "ShardedStream":
        """Whole streams of one folder, one after another."""
        first = streams[0]
        return ShardedStream([shard for stream in streams for shard in stream._shards], first._kind, first._eos)

    def __len__(self) -> int:
        return self._length

    def head(self, documents: int | None) -> "ShardedStream":
        """The first documents; all for None."""
        if documents is None:
            return self
        begun = 0
        for start in range(0, self._length, _READ_TOGETHER):
            begins = (self.read(start, start + _READ_TOGETHER) == self._eos).nonzero().flatten()
            if begun + len(begins) > documents:
                length = start + int(begins[documents - begun])
                return ShardedStream(self._shards, self._kind, self._eos, length)
            begun += len(begins)
        return self

    def read(self, start: int, stop: int) -> Tensor:
        """Tokens start..stop-1 as int64, fewer at the end of the stream.

        Raises ValueError that names the shard where it has become unreadable or shorter.
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
        return part


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
        """Raise ValueError where the shards were made with another tokenizer."""
        if tokenizer_hash(tokenizer) != self.manifest["tokenizer"]["sha256"]:
            raise ValueError(
                f"{self.flag} {self.path} was made with another tokenizer than {tokenizer.name_or_path}: pass "
                f"--tokenizer_name {self.path / TOKENIZER}, or prepare the shards again."
            )


def open_folder(path: str, flag: str) -> ShardFolder:
    """Read the manifest and check that every shard is there. Raises ValueError that names the flag and the file."""
    folder = Path(path)
    manifest = read_manifest(folder, flag)
    kind, eos = KINDS[manifest["dtype"]], manifest["eos_token_id"]
    corpora = [
        ShardedCorpus(
            name,
            *(ShardedStream(_shards(folder, corpus[part]), kind, eos) for part in ("train", "validation")),
            corpus["weight"],
        )
        for name, corpus in manifest["corpora"].items()
    ]
    shards = [shard for part in _parts(manifest) for shard in _shards(folder, part)]
    for shard in shards:
        _check_size(shard, kind, flag)
    if sum(shard.tokens for shard in shards) * kind.itemsize <= _HASHED_AT_ONCE:
        for shard in shards:
            _check_hash(shard, flag)
    return ShardFolder(folder, flag, manifest, corpora)


def read_manifest(folder: Path, flag: str) -> dict:
    """The manifest of a folder of shards. Raises ValueError that names the flag where there is none to be read."""
    # Unlike Path.is_dir it answers for a name that is too long, too.
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {folder} is no folder: name one that python -m hope_hf.data.prepare wrote.")
    path = folder / MANIFEST
    if not path.is_file():
        raise ValueError(f"{flag} {folder} has no {MANIFEST}: finish it with python -m hope_hf.data.prepare.")
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        whole = manifest["format"] == FORMAT and manifest["dtype"] in KINDS and manifest["tokenizer"]["sha256"]
        files = [shard["file"] for part in _parts(manifest) for shard in part["shards"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{flag} {path} cannot be read, prepare the shards again: {error!r}.") from None
    if not whole or not all(map(is_inside, files)):
        raise ValueError(f"{flag} {path} is not of this version: prepare the shards again.")
    return manifest


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(shard: Shard, flag: str) -> None:
    if file_hash(shard.path) != shard.sha256:
        raise ValueError(f"{flag}: {shard.path} has changed since it was written (SHA-256): {_AGAIN}.")


def _check_size(shard: Shard, kind: np.dtype, flag: str) -> None:
    if not shard.path.is_file():
        raise ValueError(f"{flag}: {shard.path} is missing: {_AGAIN}.")
    size, expected = shard.path.stat().st_size, shard.tokens * kind.itemsize
    if size != expected:
        raise ValueError(f"{flag}: {shard.path} has {size} bytes instead of {expected}: {_AGAIN}.")


def _parts(manifest: dict) -> Iterator[dict]:
    for corpus in manifest["corpora"].values():
        yield corpus["train"]
        yield corpus["validation"]


def _shards(folder: Path, part: dict) -> list[Shard]:
    return [Shard(folder / shard["file"], shard["tokens"], shard["sha256"]) for shard in part["shards"]]
