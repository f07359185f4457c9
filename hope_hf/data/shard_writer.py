"""Writes the shards of one corpus; a killed process loses the shard that it was writing, and no more.

A shard is written under another name, moved to its own, and then noted in `progress.jsonl`. A later process goes on
behind the last one that is noted, with the same bytes as if nothing had happened.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

PROGRESS = "progress.jsonl"


@dataclass(frozen=True)
class Written:
    """One finished shard, as noted in `progress.jsonl`."""

    part: str
    """Corpus and `train` or `validation`: web/train."""
    file: str
    documents: int
    tokens: int
    text_bytes: int
    sha256: str
    last: bool
    """Whether its part has no more shards."""


class Progress:
    """The shards of a folder that are finished."""

    def __init__(self, folder: Path):
        self._file = folder / PROGRESS
        self._written: list[Written] = []
        if self._file.exists():
            # The last line is not whole if the process was killed while it wrote it.
            lines = self._file.read_text(encoding="utf-8").split("\n")[:-1]
            self._written = [Written(**json.loads(line)) for line in lines]
            self._rewrite()

    def of(self, part: str) -> list[Written]:
        """The finished shards of a part, in order."""
        return [written for written in self._written if written.part == part]

    @property
    def text_bytes(self) -> int:
        """Of all finished shards."""
        return sum(written.text_bytes for written in self._written)

    def note(self, written: Written) -> None:
        """Note a shard whose file is in its place."""
        self._written.append(written)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(written)) + "\n")
            _flush(file)

    def forget(self, part: str, first: int) -> None:
        """Forget the shards of a part from number `first` on."""
        kept = {written.file for written in self.of(part)[:first]}
        self._written = [written for written in self._written if written.part != part or written.file in kept]
        self._rewrite()

    def _rewrite(self) -> None:
        scratch = self._file.with_suffix(".tmp")
        with scratch.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(written)) + "\n" for written in self._written)
            _flush(file)
        scratch.replace(self._file)


@dataclass(frozen=True)
class Encoded:
    """Documents read together, in order."""

    tokens: np.ndarray
    """Of all documents, one after another, in the shards' dtype."""
    lengths: list[int]
    """Tokens of each."""
    text_bytes: list[int]
    """Bytes of each in UTF-8."""


def write_shards(
    folder: Path, part: str, batches: Iterator[Encoded], progress: Progress, shard_tokens: int, max_tokens: int | None
) -> None:
    """Write the rest of a part: from the documents behind the noted shards to the last one.

    A shard ends with the documents that were read together when it has `shard_tokens`; the part ends with the
    document that makes it `max_tokens`.
    """
    done = progress.of(part)
    tokens = sum(written.tokens for written in done)
    index = len(done)
    (folder / part).parent.mkdir(exist_ok=True)
    shard = _OpenShard(folder, part, index)
    for batch in batches:
        if shard.tokens >= shard_tokens:
            progress.note(shard.finish(last=False))
            index += 1
            shard = _OpenShard(folder, part, index)
        if max_tokens is not None:
            batch = _up_to(batch, max_tokens - tokens)
        shard.write(batch)
        tokens += len(batch.tokens)
        if max_tokens is not None and tokens >= max_tokens:
            break
    progress.note(shard.finish(last=True))


class _OpenShard:
    def __init__(self, folder: Path, part: str, index: int):
        self.part, self.name = part, f"{part}-{index:05}.bin"
        self._path = folder / self.name
        self._scratch = self._path.with_suffix(".tmp")
        self._file = self._scratch.open("wb")
        self._hash = hashlib.sha256()
        self.documents = self.tokens = self.text_bytes = 0

    def write(self, batch: Encoded) -> None:
        data = batch.tokens.tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.documents += len(batch.lengths)
        self.tokens += len(batch.tokens)
        self.text_bytes += sum(batch.text_bytes)

    def finish(self, last: bool) -> Written:
        _flush(self._file)
        self._file.close()
        self._scratch.replace(self._path)
        return Written(
            self.part, self.name, self.documents, self.tokens, self.text_bytes, self._hash.hexdigest(), last
        )


def _up_to(batch: Encoded, tokens: int) -> Encoded:
    """The first documents until they have `tokens` tokens together."""
    begins = np.cumsum([0, *batch.lengths[:-1]])
    count = int((begins < tokens).sum())
    return Encoded(batch.tokens[: sum(batch.lengths[:count])], batch.lengths[:count], batch.text_bytes[:count])


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())
