"""Encodes documents and writes them into the shards of one corpus.

A shard is written under another name, moved to its own, and then noted in `progress.jsonl`. A process that is killed
loses the shard that it was writing; a later process continues after the last noted shard and writes the same bytes.
"""

import hashlib
import json
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, fields
from itertools import chain
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from hope_hf.common.files import flush_to_disk, read_small, replace_text, unfinished
from hope_hf.common.process import sigterm_on_parent_exit

from .encoding import Encode, make_encoder
from .shards import shard_name
from .vocabulary import load_tokenizer

PROGRESS = "progress.jsonl"
# Characters that are encoded together: enough for all threads, and few enough to wait for.
CHARACTERS = 1 << 20
_READ_TOGETHER = 8
_encode: Encode


@dataclass(frozen=True)
class Written:
    """One finished shard, as noted in `progress.jsonl`."""

    part: str
    """Corpus and side (`train` or `validation`), such as web/train."""
    file: str
    documents: int
    tokens: int
    text_bytes: int
    sha256: str
    last: bool
    """Whether this is the last shard of its part."""


class Progress:
    """The shards of a folder that are finished.

    parts: the parts that may occur. Raises ValueError that names the file if it is not as prepare wrote it.
    """

    def __init__(self, folder: Path, parts: Collection[str]):
        self._file = folder / PROGRESS
        self._written: list[Written] = []
        if not os.path.lexists(self._file):
            return
        try:
            # The last line is incomplete if the process was killed while writing it.
            for number, line in enumerate(read_small(self._file).split("\n")[:-1], start=1):
                self._read(number, line, parts)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"--output_dir {self._file} is not as prepare wrote it, {reason}: delete it, and the same command "
                "writes all shards again."
            ) from None

    def of(self, part: str) -> list[Written]:
        """The finished shards of a part, in order."""
        return [written for written in self._written if written.part == part]

    @property
    def tokens(self) -> int:
        """Tokens of all finished shards."""
        return sum(written.tokens for written in self._written)

    @property
    def text_bytes(self) -> int:
        """Bytes of text of all finished shards."""
        return sum(written.text_bytes for written in self._written)

    def note(self, written: Written) -> None:
        """Note a shard whose file is in its place."""
        self._written.append(written)
        with open(self._file, "a", encoding="utf-8", opener=_open_no_link) as file:
            file.write(_line(written))
            flush_to_disk(file)

    def forget(self, part: str, first: int) -> None:
        """Forget the shards of a part from number `first` on; `rewrite` removes them from the file."""
        for written in self.of(part)[first:]:
            self._written.remove(written)

    def rewrite(self) -> None:
        """Write the file anew, without forgotten shards and incomplete lines."""
        replace_text(self._file, "".join(map(_line, self._written)))

    def _read(self, number: int, line: str, parts: Collection[str]) -> None:
        try:
            written = Written(**json.loads(line))
            for field in fields(written):
                value = getattr(written, field.name)
                if type(value) is not field.type:
                    raise ValueError(f"{field.name} is {value!r}")
        # RecursionError: thousands of nested brackets. TypeError: other fields than those of `Written`.
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"line {number} is not a shard: {error}") from None
        before = self.of(written.part)
        if written.part not in parts or written.file != shard_name(written.part, len(before)):
            raise ValueError(f"line {number} is repeated or out of order")
        if before and before[-1].last:
            raise ValueError(f"line {number} follows the last shard of its part")
        self._written.append(written)


def _open_no_link(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, 0o666)


def _line(written: Written) -> str:
    return json.dumps(asdict(written)) + "\n"


@dataclass(frozen=True)
class Encoded:
    """Documents read together, in order."""

    tokens: np.ndarray
    """Token ids of all documents, concatenated, in the shards' dtype."""
    lengths: list[int]
    """Tokens of each document."""
    text_bytes: list[int]
    """Bytes of each document in UTF-8."""


def write_shards(
    folder: Path, part: str, batches: Iterator[Encoded], progress: Progress, shard_tokens: int, max_tokens: int | None
) -> None:
    """Write the rest of a part; `batches`: its documents after those of the shards in `progress`.

    A shard ends with the batch that reaches `shard_tokens`, the part with the document that reaches `max_tokens`.
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
        self.part, self.name = part, shard_name(part, index)
        self._path = folder / self.name
        self._scratch = unfinished(self._path)
        self._file = self._scratch.open("xb")
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
        flush_to_disk(self._file)
        self._file.close()
        self._scratch.replace(self._path)
        return Written(
            self.part, self.name, self.documents, self.tokens, self.text_bytes, self._hash.hexdigest(), last
        )


def _up_to(batch: Encoded, tokens: int) -> Encoded:
    """The first documents until they have `tokens` tokens together."""
    begins = np.cumsum([0, *batch.lengths[:-1]])
    count = int((begins < tokens).sum())
    lengths = batch.lengths[:count]
    return Encoded(batch.tokens[: sum(lengths)], lengths, batch.text_bytes[:count])


class EncodingPool(ProcessPoolExecutor):
    """Processes that encode with the tokenizer saved in a folder."""

    def __init__(self, tokenizer_folder: str, count: int):
        super().__init__(count, get_context("spawn"), _begin, (tokenizer_folder,))
        self.count = count


def encoded(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, kind: np.dtype, pool: EncodingPool | None
) -> Iterator[Encoded]:
    """The tokens of all documents in their order, about 1 MB of text at a time.

    Raises ValueError if a process of the pool was killed.
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
            # Enough batches to keep all processes busy; documents are not read further ahead.
            if len(waiting) > 2 * pool.count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise ValueError(
            f"One of the {pool.count} processes of --num_proc was killed, perhaps out of memory: lower it; "
            "the same command continues where it stopped."
        ) from None


def _batches(documents: Dataset) -> Iterator[list[str]]:
    texts = []
    characters = 0
    for rows in documents.iter(_READ_TOGETHER):
        texts += rows["text"]
        characters += sum(map(len, rows["text"]))
        if characters >= CHARACTERS:
            yield texts
            texts = []
            characters = 0
    if texts:
        yield texts


def _begin(tokenizer_folder: str) -> None:
    global _encode
    sigterm_on_parent_exit()
    _encode = make_encoder(load_tokenizer(tokenizer_folder))


def _work(texts: list[str], kind: np.dtype) -> Encoded:
    return _pack(_encode, texts, kind)


def _pack(encode: Encode, texts: Iterable[str], kind: np.dtype) -> Encoded:
    rows = encode(texts)
    lengths = list(map(len, rows))
    tokens = np.fromiter(chain.from_iterable(rows), dtype=kind, count=sum(lengths))
    return Encoded(tokens, lengths, [len(text.encode("utf-8", errors="surrogatepass")) for text in texts])
