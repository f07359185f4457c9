"""From a mixture to a folder of shards: what is read, room for it, the shards, and the manifest."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hope_hf.cli.files import replace_text
from hope_hf.cli.provenance import provenance

from .corpora import Documents, require_as_many
from .encode_batches import EncodingPool, encoded
from .encoding import make_encoder
from .shard_writer import Encoded, Progress, write_shards
from .shards import FORMAT, KINDS, MANIFEST, TOKENIZER, file_hash, read_manifest
from .tokenizer_sample import drawn, text_bytes
from .vocabulary import save_tokenizer, tokenizer_hash

PLAN = "plan.json"
_SEQUENCES = (1024, 2048, 4096, 8192)
# Bytes of each corpus that are encoded to foresee its tokens.
_SAMPLE = 200_000
_PARTS = ("train", "validation")


class Preparation:
    """The shards of a mixture in one folder.

    settings: flags that change what is written.
    """

    def __init__(self, folder: Path, documents: list[Documents], tokenizer: PreTrainedTokenizerBase, settings: dict):
        self.folder, self.documents, self.tokenizer = folder, documents, tokenizer
        self.dtype = "uint16" if len(tokenizer) <= 1 << 16 else "uint32"
        self.bytes = {
            (part.corpus.name, side): text_bytes(getattr(part, side)) for part in documents for side in _PARTS
        }
        self.plan = {
            "format": FORMAT,
            "tokenizer": {"sha256": tokenizer_hash(tokenizer), "entries": len(tokenizer)},
            **settings,
            "corpora": {
                part.corpus.name: {
                    **part.corpus.facts(),
                    "documents": len(part.train) + len(part.validation),
                    "text_bytes": sum(self.bytes[part.corpus.name, side] for side in _PARTS),
                }
                for part in documents
            },
        }

    def check_folder(self) -> None:
        """Raise ValueError where the folder holds other shards than these."""
        there = self.plan
        if (self.folder / MANIFEST).is_file():
            there = read_manifest(self.folder, "--output_dir")["plan"]
        elif (self.folder / PLAN).is_file():
            there = json.loads((self.folder / PLAN).read_text(encoding="utf-8"))
        if there != self.plan:
            raise ValueError(
                f"--output_dir {self.folder} holds other shards ({_difference(there, self.plan)}): name another "
                "folder or remove that one."
            )

    def check_room(self) -> None:
        """Raise ValueError where the disk has less room than the shards will need."""
        encode, needed = make_encoder(self.tokenizer), 0
        for part in self.documents:
            texts = list(drawn(part.train, self.bytes[part.corpus.name, "train"], _SAMPLE))
            tokens, sampled = sum(map(len, encode(texts))), sum(len(text.encode()) for text in texts)
            most = sum(self.bytes[part.corpus.name, side] for side in _PARTS) * tokens / sampled
            needed += min(most, part.corpus.max_tokens or most)
        written = sum(file.stat().st_size for file in self.folder.glob("*/*.bin"))
        needed = int(needed * KINDS[self.dtype].itemsize) - written
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise ValueError(
                f"--output_dir {self.folder} has {free / 1e9:.1f} GB of free disk and the shards need about "
                f"{needed / 1e9:.1f} GB: free some, or name a folder on another disk."
            )

    def write(self, num_proc: int, shard_tokens: int, show_bar: bool) -> None:
        """Write what is missing or broken, then the manifest."""
        save_tokenizer(self.tokenizer, self.folder / TOKENIZER)
        _write_json(self.folder / PLAN, self.plan)
        for scratch in self.folder.glob("*/*.tmp"):
            scratch.unlink()
        progress = Progress(self.folder)
        for corpus, side in self.bytes:
            self._forget_broken(f"{corpus}/{side}", progress)
        pool = EncodingPool(str(self.folder / TOKENIZER), num_proc) if num_proc > 1 else nullcontext()
        total, done = sum(self.bytes.values()), progress.text_bytes
        bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, disable=not show_bar)
        with pool as workers, bar:
            speed = _Speed(bar)
            for documents in self.documents:
                for side in _PARTS:
                    self._write_part(documents, side, progress, workers, shard_tokens, speed)
        _write_json(self.folder / MANIFEST, self._manifest(progress))
        (self.folder / PLAN).unlink()

    def _write_part(self, documents: Documents, side: str, progress: Progress, pool, shard_tokens: int, speed):
        corpus = documents.corpus
        part = f"{corpus.name}/{side}"
        done = progress.of(part)
        if done and done[-1].last:
            return
        read: Dataset = getattr(documents, side)
        rest = read.select(range(sum(written.documents for written in done), len(read)))
        batches = speed.watch(encoded(rest, self.tokenizer, KINDS[self.dtype], pool))
        limit = corpus.max_tokens if side == "train" else None
        write_shards(self.folder, part, batches, progress, shard_tokens, limit)
        speed.leave(self.bytes[corpus.name, side] - sum(written.text_bytes for written in progress.of(part)))
        if limit is not None:
            require_as_many(corpus, "max_tokens", sum(written.tokens for written in progress.of(part)))

    def _forget_broken(self, part: str, progress: Progress) -> None:
        """Write again from the first shard on that is not as it was noted."""
        for index, written in enumerate(progress.of(part)):
            path = self.folder / written.file
            if not path.is_file() or file_hash(path) != written.sha256:
                progress.forget(part, index)
                return

    def _manifest(self, progress: Progress) -> dict:
        sides = {}
        for documents in self.documents:
            name = documents.corpus.name
            sides[name] = {
                "weight": documents.corpus.weight,
                **{side: _side(progress.of(f"{name}/{side}")) for side in _PARTS},
                "dropped": dict(documents.dropped),
            }
        facts = provenance()
        return {
            "format": FORMAT,
            "dtype": self.dtype,
            "eos_token_id": self.tokenizer.eos_token_id,
            "tokenizer": self.plan["tokenizer"],
            "corpora": sides,
            "plan": self.plan,
            "versions": facts["versions"],
            "git": facts["git"],
        }


class _Speed:
    """The bar's bytes and tokens per second."""

    def __init__(self, bar: tqdm):
        self._bar, self._tokens, self._begin = bar, 0, time.monotonic()

    def leave(self, text_bytes: int) -> None:
        """Bytes that a limit leaves unread."""
        self._bar.total -= text_bytes

    def watch(self, batches: Iterator[Encoded]) -> Iterator[Encoded]:
        """The batches, counted."""
        for batch in batches:
            yield batch
            self._tokens += len(batch.tokens)
            rate = self._tokens / (time.monotonic() - self._begin)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            self._bar.update(sum(batch.text_bytes))


def _side(shards: list) -> dict:
    tokens = sum(shard.tokens for shard in shards)
    return {
        "documents": sum(shard.documents for shard in shards),
        "tokens": tokens,
        "text_bytes": sum(shard.text_bytes for shard in shards),
        "sequences": {str(length): tokens // length for length in _SEQUENCES},
        "shards": [{"file": shard.file, "tokens": shard.tokens, "sha256": shard.sha256} for shard in shards],
    }


def _difference(there: dict, here: dict, name: str = "") -> str:
    """Where two plans differ first, in words."""
    for key in dict.fromkeys([*here, *there]):
        left, right = here.get(key), there.get(key)
        if left == right:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            return _difference(right, left, f"{name}{key}: ")
        return f"{name}{key} is {json.dumps(right)}, now {json.dumps(left)}"
    raise AssertionError("equal plans")


def _write_json(path: Path, document: dict) -> None:
    replace_text(path, json.dumps(document, indent=2) + "\n")
