"""The shards of a mixture: written once, continued after a killed process, rewritten where they were changed."""

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

from datasets import Dataset
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hope_hf.common.files import free_disk, is_unfinished, read_object, replace_text
from hope_hf.common.folder_lock import LOCK_FILE, FolderLock
from hope_hf.common.results import provenance

from .corpora import Documents, check_cache, open_corpus, require_as_many, warn_of_excess
from .encoding import document_start, make_encoder
from .mixture import Corpus
from .prepare import Arguments
from .shard_writer import PROGRESS, Encoded, EncodingPool, Progress, Written, encoded, write_shards
from .shards import FORMAT, KINDS, MANIFEST, PARTS, TOKENIZER, dtype_of, file_hash, read_manifest
from .tokenizer_text import drawn, text_bytes
from .vocabulary import load_tokenizer, save_tokenizer, tokenizer_hash

PLAN = "plan.json"
# The key of a corpus's texts in their order: a changed text may have as many bytes.
_TEXT_HASH = "text_hash"
_SEQUENCES = (1024, 2048, 4096, 8192)
# Bytes of each corpus that are encoded to estimate its number of tokens.
_SAMPLE = 200_000


def require_own(folder: Path) -> None:
    """Raise ValueError if a folder holds other files than shards, such as those of a run."""
    if os.path.lexists(folder / MANIFEST) or os.path.lexists(folder / PLAN):
        return
    for path in sorted(folder.iterdir()):
        # These two may be left by a process that was killed before its plan was in place.
        if path.name != LOCK_FILE and not is_unfinished(path.name, re.escape(PLAN)):
            raise ValueError(
                f"--output_dir {folder} holds {path.name!r}, which is not a file of shards: name an empty folder."
            )


class Preparation:
    """The shards of a mixture in one folder.

    settings: flags that change what is written.
    """

    def __init__(self, folder: Path, documents: list[Documents], tokenizer: PreTrainedTokenizerBase, settings: dict):
        self.folder = folder
        self.documents = documents
        self.tokenizer = tokenizer
        self.dtype = dtype_of(tokenizer)
        # By (corpus, side), bytes of text.
        self.bytes = {}
        corpora = {}
        for part in documents:
            name = part.corpus.name
            digest = hashlib.blake2b(digest_size=16)
            for side in PARTS:
                self.bytes[name, side] = text_bytes(getattr(part, side), digest)
            corpora[name] = {
                **part.corpus.facts(),
                "documents": len(part.train) + len(part.validation),
                "text_bytes": self._text_bytes(name),
                _TEXT_HASH: digest.hexdigest(),
            }
        self.plan = {
            "format": FORMAT,
            "tokenizer": {"sha256": tokenizer_hash(tokenizer), "entries": len(tokenizer)},
            **settings,
            "corpora": corpora,
        }

    def _text_bytes(self, corpus: str) -> int:
        return sum(self.bytes[corpus, side] for side in PARTS)

    def check_folder(self) -> None:
        """Raise ValueError if the folder holds other shards than these, or links in their place."""
        if os.path.lexists(self.folder / MANIFEST):
            plan_of_folder = read_manifest(self.folder, "--output_dir").plan
        elif os.path.lexists(self.folder / PLAN):
            plan_of_folder = read_object(self.folder / PLAN, "--output_dir", "delete its folder")
        else:
            plan_of_folder = self.plan
        _add_hashes(plan_of_folder, self.plan)
        if plan_of_folder != self.plan:
            difference = _difference(plan_of_folder, self.plan)
            raise ValueError(
                f"--output_dir {self.folder} holds other shards ({difference}): name another "
                "folder or remove that one."
            )
        for name in (TOKENIZER, *self.plan["corpora"]):
            path = self.folder / name
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise ValueError(f"--output_dir {path} is a link or a file, not a folder of shards: remove it.")
        parts = [f"{corpus}/{side}" for corpus, side in self.bytes]
        self.progress = Progress(self.folder, parts)

    def check_room(self) -> None:
        """Raise ValueError if the disk has less room than the shards will need."""
        encode = make_encoder(self.tokenizer)
        tokens = 0
        for part in self.documents:
            texts = list(drawn(part.train, self.bytes[part.corpus.name, "train"], _SAMPLE))
            sampled_tokens = sum(map(len, encode(texts)))
            sampled_bytes = sum(len(text.encode()) for text in texts)
            most = self._text_bytes(part.corpus.name) * sampled_tokens / sampled_bytes
            tokens += min(most, part.corpus.max_tokens or most)
        needed = int((tokens - self.progress.tokens) * KINDS[self.dtype].itemsize)
        free = free_disk(self.folder)
        if free is not None and free < needed:
            raise ValueError(
                f"--output_dir {self.folder} has {free / 1e9:.1f} GB of free disk and the shards need about "
                f"{needed / 1e9:.1f} GB: free some, or name a folder on another disk."
            )

    def write(self, num_proc: int, shard_tokens: int, show_bar: bool) -> None:
        """Write the missing or broken shards, then the manifest."""
        _write_json(self.folder / PLAN, self.plan)
        save_tokenizer(self.tokenizer, self.folder / TOKENIZER)
        self._clean_up()
        for corpus, side in self.bytes:
            self._forget_broken(f"{corpus}/{side}")
        self.progress.rewrite()
        pool = EncodingPool(str(self.folder / TOKENIZER), num_proc) if num_proc > 1 else nullcontext()
        total = sum(self.bytes.values())
        bar = tqdm(total=total, initial=self.progress.text_bytes, unit="B", unit_scale=True, disable=not show_bar)
        with pool as workers, bar:
            speed = _Speed(bar)
            for documents in self.documents:
                for side in PARTS:
                    self._write_part(documents, side, workers, shard_tokens, speed)
        _write_json(self.folder / MANIFEST, self._manifest())
        (self.folder / PLAN).unlink()

    def _write_part(self, documents: Documents, side: str, pool, shard_tokens: int, speed):
        corpus = documents.corpus
        part = f"{corpus.name}/{side}"
        done = self.progress.of(part)
        read: Dataset = getattr(documents, side)
        limit = corpus.max_tokens if side == "train" else None
        if not done or not done[-1].last:
            rest = read.select(range(min(_documents(done), len(read)), len(read)))
            batches = speed.watch(encoded(rest, self.tokenizer, KINDS[self.dtype], pool))
            write_shards(self.folder, part, batches, self.progress, shard_tokens, limit)
            done = self.progress.of(part)
            written_bytes = sum(written.text_bytes for written in done)
            speed.leave(self.bytes[corpus.name, side] - written_bytes)
        count = _documents(done)
        if count > len(read) or (limit is None and count < len(read)):
            raise ValueError(
                f"--output_dir {self.folder / PROGRESS} counts {count} documents of {part} instead of {len(read)}: "
                "delete it, and the same command writes all shards again."
            )
        if limit is not None:
            tokens = sum(written.tokens for written in done)
            require_as_many(corpus, "max_tokens", tokens)
            warn_of_excess(corpus, tokens)

    def _clean_up(self) -> None:
        """Remove the unfinished files of killed processes, recognized by their names."""
        self._remove_unfinished(self.folder, "|".join(map(re.escape, (MANIFEST, PLAN, PROGRESS))))
        for corpus in self.plan["corpora"]:
            folder = self.folder / corpus
            if folder.is_dir():
                self._remove_unfinished(folder, rf"(?:{'|'.join(PARTS)})-[0-9]{{5,}}\.bin")

    @staticmethod
    def _remove_unfinished(folder: Path, names: str) -> None:
        for path in folder.iterdir():
            if is_unfinished(path.name, names) and not path.is_dir():
                path.unlink()

    def _forget_broken(self, part: str) -> None:
        """Mark for rewriting all shards from the first one that differs from its note."""
        for index, written in enumerate(self.progress.of(part)):
            path = self.folder / written.file
            size = written.tokens * KINDS[self.dtype].itemsize
            is_whole = path.is_file() and not path.is_symlink() and path.stat().st_size == size
            if not is_whole or file_hash(path) != written.sha256:
                self.progress.forget(part, index)
                return

    def _manifest(self) -> dict:
        corpora = {}
        for documents in self.documents:
            name = documents.corpus.name
            corpora[name] = {"weight": documents.corpus.weight}
            for side in PARTS:
                corpora[name][side] = _side(self.progress.of(f"{name}/{side}"))
            corpora[name]["dropped"] = dict(documents.dropped)
        facts = provenance()
        return {
            "format": FORMAT,
            "dtype": self.dtype,
            "eos_token_id": document_start(self.tokenizer),
            "tokenizer": self.plan["tokenizer"],
            "corpora": corpora,
            "plan": self.plan,
            "versions": facts["versions"],
            "git": facts["git"],
        }


class _Speed:
    """The bar's bytes and tokens per second."""

    def __init__(self, bar: tqdm):
        self._bar = bar
        self._tokens = 0
        self._begin = time.monotonic()

    def leave(self, text_bytes: int) -> None:
        """Subtract bytes that remain unread because of a limit."""
        self._bar.total -= text_bytes

    def watch(self, batches: Iterator[Encoded]) -> Iterator[Encoded]:
        """The batches; each one advances the bar."""
        for batch in batches:
            yield batch
            self._tokens += len(batch.tokens)
            rate = self._tokens / (time.monotonic() - self._begin)
            self._bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)
            self._bar.update(sum(batch.text_bytes))


def _documents(shards: list[Written]) -> int:
    return sum(shard.documents for shard in shards)


def _side(shards: list[Written]) -> dict:
    tokens = 0
    text_bytes = 0
    entries = []
    for shard in shards:
        tokens += shard.tokens
        text_bytes += shard.text_bytes
        entries.append({"file": shard.file, "tokens": shard.tokens, "sha256": shard.sha256})
    return {
        "documents": _documents(shards),
        "tokens": tokens,
        "text_bytes": text_bytes,
        "sequences": {str(length): tokens // length for length in _SEQUENCES},
        "shards": entries,
    }


def _add_hashes(plan_of_folder: dict, plan: dict) -> None:
    """Give the plan of a folder of before, which has no hashes of texts, those of this plan."""
    of_folder = plan_of_folder.get("corpora")
    for name, corpus in plan["corpora"].items():
        if isinstance(of_folder, dict) and isinstance(of_folder.get(name), dict):
            of_folder[name].setdefault(_TEXT_HASH, corpus[_TEXT_HASH])


def _difference(plan_of_folder: dict, plan: dict, name: str = "") -> str:
    """The first difference between two plans, in words; that of the folder may hold anything."""
    for key in dict.fromkeys([*plan, *plan_of_folder]):
        before = plan_of_folder.get(key)
        now = plan.get(key)
        if before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            return _difference(before, now, f"{name}{key}: ")
        shown = key if key.isprintable() else json.dumps(key)
        return f"{name}{shown} is {_short(before)}, now {_short(now)}"
    raise AssertionError("equal plans")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _write_json(path: Path, document: dict) -> None:
    replace_text(path, json.dumps(document, indent=2) + "\n")


# Flags that change what is written.
_SETTINGS = ("seed", "validation_split_percentage", "max_eval_samples", "shard_tokens")


def prepare(corpora: list[Corpus], args: Arguments) -> None:
    """Write the shards of the corpora, or what is missing of them, and report them."""
    tokenizer = load_tokenizer(args.tokenizer_name)
    folder = Path(args.output_dir)
    lock = FolderLock(folder)
    lock.acquire()
    try:
        require_own(folder)
        percentage = args.validation_split_percentage
        check_cache(corpora, percentage, args.seed, tokenizer, folder)
        documents = []
        for corpus in corpora:
            documents.append(open_corpus(corpus, percentage, args.max_eval_samples, args.seed, tokenizer))
        settings = {name: getattr(args, name) for name in _SETTINGS}
        preparation = Preparation(folder, documents, tokenizer, settings)
        preparation.check_folder()
        preparation.check_room()
        preparation.write(args.num_proc, args.shard_tokens, sys.stderr.isatty())
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be written: {error.strerror or error}.") from error
    finally:
        lock.release()
    _report(folder)


def _report(folder: Path) -> None:
    corpora = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["corpora"]
    for name, corpus in corpora.items():
        train = corpus["train"]
        validation = corpus["validation"]
        line = (
            f"{name}: {train['documents']:,} documents, {train['tokens']:,} tokens in {len(train['shards'])} shards; "
            f"validation {validation['documents']:,}, {validation['tokens']:,}"
        )
        counts = [f"{reason} {count:,}" for reason, count in corpus["dropped"].items()]
        dropped = ", ".join(counts)
        print(f"{line}; dropped: {dropped}" if dropped else line)
    print(f"Train on them with --train_shards {folder}")
