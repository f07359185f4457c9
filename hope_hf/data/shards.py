"""Prepared shards: files of tokens, of which only the needed tokens are read, and the manifest that describes them.

    shards/
      manifest.json         corpora, sizes, hashes, and the settings of prepare
      tokenizer/
      web/train-00000.bin   token ids one after another, uint16 or uint32, little-endian
      web/validation-00000.bin

A document begins at each EOS token; it may end in the next shard. `hope_hf.data.shard_writer` writes them.
"""

import hashlib
import os
import reprlib
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from hope_hf.common.files import is_inside, read_object
from hope_hf.common.process import one_line

from .config import DataConfig
from .encoding import document_start
from .manifest_name import MANIFEST, require_shards
from .mixture import check_weights, is_corpus_name, is_weight
from .packing import Block, CorpusTokens, Stream
from .vocabulary import check_vocabulary, highest_id, load_tokenizer, tokenizer_hash

TOKENIZER = "tokenizer"
FORMAT = 1
KINDS = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PARTS = ("train", "validation")
# A folder of up to so many bytes is hashed when a run begins (seconds); larger ones are checked by file size.
_HASHED_AT_ONCE = 1 << 30
_READ_TOGETHER = 1 << 22
_AGAIN = "repeat the hope-hf prepare command of this folder, it rewrites broken files"


def dtype_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name in `KINDS` of the type that holds the tokenizer's ids."""
    return "uint16" if highest_id(tokenizer) < 1 << 16 else "uint32"


def shard_name(part: str, index: int) -> str:
    """The file of a shard of a part such as web/train, in its folder."""
    return f"{part}-{index:05}.bin"


@dataclass(frozen=True)
class Shard:
    """One file of tokens."""

    path: Path
    tokens: int
    sha256: str


class ShardedStream(Stream):
    """The tokens of shards one after another; only what is read is loaded, and no file is kept open.

    length: tokens of the stream, if it ends before the last shard does.
    """

    def __init__(self, shards: Sequence[Shard], kind: np.dtype, eos: int, length: int | None = None):
        super().__init__([shard.tokens for shard in shards])
        if length is not None:
            self._length = length
        self.shards = list(shards)
        self.kind = kind
        self._eos = eos
        self.highest_id = int(np.iinfo(kind).max)
        """The highest valid id; reading a higher one raises an error."""

    @staticmethod
    def join(streams: Sequence["ShardedStream"]) -> "ShardedStream":
        """Whole streams of one folder, one after another."""
        shards = []
        for stream in streams:
            shards += stream.shards
        return streams[0]._with(shards, None)

    def head(self, documents: int | None) -> "ShardedStream":
        """The first documents; all for None."""
        if documents is None:
            return self
        earlier = 0
        for start in range(0, self._length, _READ_TOGETHER):
            begins = self.block(start, _READ_TOGETHER).starts
            if earlier + len(begins) > documents:
                return self._with(self.shards, start + int(begins[documents - earlier]))
            earlier += len(begins)
        return self

    def block(self, start: int, length: int) -> Block:
        """The `length` tokens from `start` on, fewer at the end of the stream."""
        tokens = self.read(start, start + length)
        return Block(tokens, (tokens == self._eos).nonzero().flatten())

    def digest(self) -> str:
        """A hash of the tokens, made from the hashes of the shards."""
        parts = repr(([shard.sha256 for shard in self.shards], self._length))
        return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()

    def _read_part(self, index: int, start: int, stop: int) -> np.ndarray:
        """Raises ValueError that names a shard that has become unreadable or shorter, or that has a wrong id."""
        path = self.shards[index].path
        # Read, not mapped: a map keeps a descriptor open per shard, and a mapped file that is truncated would kill
        # the process.
        try:
            offset = start * self.kind.itemsize
            part = np.fromfile(path, self.kind, stop - start, offset=offset)
        except OSError as error:
            raise ValueError(f"The shard {path} cannot be read any more: {error.strerror}.") from error
        if len(part) < stop - start:
            raise ValueError(f"The shard {path} was truncated while it was in use: {_AGAIN}.")
        # This takes about a microsecond per block; checking all shards beforehand would take minutes.
        if len(part) and part.max() > self.highest_id:
            raise ValueError(
                f"The shard {path} holds the id {part.max()}, and the tokenizer's ids end at {self.highest_id}: "
                "prepare the shards again."
            )
        return part

    def _with(self, shards: list[Shard], length: int | None) -> "ShardedStream":
        stream = ShardedStream(shards, self.kind, self._eos, length)
        stream.highest_id = self.highest_id
        return stream


@dataclass(frozen=True)
class ShardFolder:
    """What a folder's manifest says."""

    path: Path
    flag: str
    """What names the folder in errors."""
    corpora: list[CorpusTokens]
    """Their streams are `ShardedStream`."""
    document_start: int
    """The token that begins every document: EOS, unless the tokenizer begins prompts with another one."""
    tokenizer_hash: str
    plan: dict
    """The settings of prepare."""

    def tokenizer(self, config: DataConfig) -> PreTrainedTokenizerBase:
        """The tokenizer of `--tokenizer_name`, which must equal the shards' own, or the one in the folder."""
        name = config.tokenizer_name or str(self.path / TOKENIZER)
        tokenizer = load_tokenizer(name, config.trust_remote_code)
        self.check_tokenizer(tokenizer)
        if config.vocab_size is not None:
            check_vocabulary(tokenizer, config.vocab_size)
        return tokenizer

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise ValueError if the shards were made with another tokenizer; then ids above its highest are errors."""
        if tokenizer_hash(tokenizer) != self.tokenizer_hash:
            raise ValueError(
                f"{self.flag} {self.path} was made with another tokenizer than {tokenizer.name_or_path}: prepare "
                f"the shards again with it or, for a new model, pass --tokenizer_name {self.path / TOKENIZER}."
            )
        start = document_start(tokenizer)
        if self.document_start != start:
            raise ValueError(
                f"{self.flag} {self.path / MANIFEST} has eos_token_id {self.document_start}, and the tokenizer begins "
                f"documents with {start}: prepare the shards again."
            )
        for corpus in self.corpora:
            corpus.train.highest_id = corpus.validation.highest_id = highest_id(tokenizer)


def read_manifest(path: str, flag: str) -> ShardFolder:
    """Read the manifest of a folder of shards, and no shard; ValueError that names the flag, the file and the fix."""
    require_shards(path, flag)
    folder = Path(path)
    file = folder / MANIFEST
    manifest = read_object(file, flag, "prepare the shards again")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{flag} {file} is of another version: prepare the shards again.")
    try:
        plan = manifest["plan"]
        if not isinstance(plan, dict):
            raise ValueError("plan is no object")
        return ShardFolder(
            folder, flag, _corpora(folder, manifest), manifest["eos_token_id"], manifest["tokenizer"]["sha256"], plan
        )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ValueError(
            f"{flag} {file} was not written by prepare, {one_line(error)}: prepare the shards again."
        ) from None


def _corpora(folder: Path, manifest: dict) -> list[CorpusTokens]:
    kind = KINDS[manifest["dtype"]]
    start = manifest["eos_token_id"]
    if not 0 <= start <= np.iinfo(kind).max:
        raise ValueError(f"eos_token_id is {start}")
    corpora = []
    weights = {}
    for name, corpus in manifest["corpora"].items():
        weight = corpus["weight"]
        if not is_corpus_name(name) or not (weight is None or is_weight(weight)):
            raise ValueError(f"corpora has {reprlib.repr(name)} of weight {reprlib.repr(weight)}")
        streams = []
        for side in PARTS:
            shards = _shards(folder, corpus[side])
            streams.append(ShardedStream(shards, kind, start))
        train, validation = streams
        corpora.append(CorpusTokens(name, train, validation, weight))
        weights[name] = weight
    if not corpora:
        raise ValueError("corpora is empty")
    check_weights(weights, "it")
    return corpora


def _shards(folder: Path, side: dict) -> list[Shard]:
    shards = []
    for entry in side["shards"]:
        name = entry["file"]
        tokens = entry["tokens"]
        if not is_inside(name) or type(tokens) is not int or tokens < 0:
            raise ValueError(f"it has the shard {name!r} of {tokens!r} tokens")
        shards.append(Shard(folder / name, tokens, entry["sha256"]))
    return shards


def open_folder(path: str, flag: str) -> ShardFolder:
    """Read the manifest and check that every shard is there. Raises ValueError that names the flag and the file."""
    folder = read_manifest(path, flag)
    streams = []
    for corpus in folder.corpora:
        streams += [corpus.train, corpus.validation]
    for stream in streams:
        for shard in stream.shards:
            _check_size(shard, stream.kind, folder)
    if sum(len(stream) * stream.kind.itemsize for stream in streams) <= _HASHED_AT_ONCE:
        for stream in streams:
            for shard in stream.shards:
                if file_hash(shard.path) != shard.sha256:
                    raise ValueError(f"{flag}: {shard.path} has changed since it was written (SHA-256): {_AGAIN}.")
    return folder


def file_hash(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_size(shard: Shard, kind: np.dtype, folder: ShardFolder) -> None:
    flag = folder.flag
    try:
        status = shard.path.stat()
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise ValueError(f"{flag}: {shard.path} {reason}: {_AGAIN}.") from None
    real_path = Path(os.path.realpath(shard.path))
    inside = real_path.is_relative_to(os.path.realpath(folder.path))
    if not inside or not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{flag}: {shard.path} is a link, pipe or folder instead of a file: {_AGAIN}.")
    size, expected = status.st_size, shard.tokens * kind.itemsize
    if size != expected:
        raise ValueError(f"{flag}: {shard.path} has {size} bytes instead of {expected}: {_AGAIN}.")
