"""Tokenize a mixture of corpora once, into shards from which a training reads only what it needs.

    hope-hf prepare mix.yaml --tokenizer_name my_tokenizer --output_dir shards
    hope-hf train --train_shards shards ...

After a killed process the same command continues; it also rewrites shards that were lost or changed.
"""

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import MISSING, dataclass
from pathlib import Path

from datasets import Dataset, disable_progress_bars
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from hope_hf.common.files import at_home, free_disk, is_unfinished, read_object, replace_text
from hope_hf.common.flags import COUNT, SEED, THREADS, check_output, flag
from hope_hf.common.folder_lock import LOCK_FILE, FolderLock
from hope_hf.common.parser import Parser
from hope_hf.common.process import print_error
from hope_hf.common.program import program
from hope_hf.common.results import provenance

from .corpora import Documents, check_cache, open_corpus, require_as_many, warn_of_excess
from .encoding import document_start, make_encoder
from .mixture import read_mixture
from .shard_writer import PROGRESS, Encoded, EncodingPool, Progress, Written, encoded, write_shards
from .shards import FORMAT, KINDS, MANIFEST, PARTS, TOKENIZER, dtype_of, file_hash, read_manifest
from .tokenizer import drawn, text_bytes
from .vocabulary import load_tokenizer, save_tokenizer, tokenizer_hash

PLAN = "plan.json"
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
        self.folder, self.documents, self.tokenizer = folder, documents, tokenizer
        self.dtype = dtype_of(tokenizer)
        self.bytes = {
            (part.corpus.name, side): text_bytes(getattr(part, side)) for part in documents for side in PARTS
        }
        self.plan = {
            "format": FORMAT,
            "tokenizer": {"sha256": tokenizer_hash(tokenizer), "entries": len(tokenizer)},
            **settings,
            "corpora": {
                part.corpus.name: {
                    **part.corpus.facts(),
                    "documents": len(part.train) + len(part.validation),
                    "text_bytes": sum(self.bytes[part.corpus.name, side] for side in PARTS),
                }
                for part in documents
            },
        }

    def check_folder(self) -> None:
        """Raise ValueError if the folder holds other shards than these, or links in their place."""
        if os.path.lexists(self.folder / MANIFEST):
            there = read_manifest(self.folder, "--output_dir")["plan"]
        elif os.path.lexists(self.folder / PLAN):
            there = read_object(self.folder / PLAN, "--output_dir", "delete its folder")
        else:
            there = self.plan
        if there != self.plan:
            raise ValueError(
                f"--output_dir {self.folder} holds other shards ({_difference(there, self.plan)}): name another "
                "folder or remove that one."
            )
        for name in (TOKENIZER, *self.plan["corpora"]):
            path = self.folder / name
            if path.is_symlink() or (path.exists() and not path.is_dir()):
                raise ValueError(f"--output_dir {path} is a link or a file, not a folder of shards: remove it.")
        self.progress = Progress(self.folder, [f"{corpus}/{side}" for corpus, side in self.bytes])

    def check_room(self) -> None:
        """Raise ValueError if the disk has less room than the shards will need."""
        encode, needed = make_encoder(self.tokenizer), 0
        for part in self.documents:
            texts = list(drawn(part.train, self.bytes[part.corpus.name, "train"], _SAMPLE))
            tokens, sampled = sum(map(len, encode(texts))), sum(len(text.encode()) for text in texts)
            most = sum(self.bytes[part.corpus.name, side] for side in PARTS) * tokens / sampled
            needed += min(most, part.corpus.max_tokens or most)
        needed = int((needed - self.progress.tokens) * KINDS[self.dtype].itemsize)
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
        total, done = sum(self.bytes.values()), self.progress.text_bytes
        bar = tqdm(total=total, initial=done, unit="B", unit_scale=True, disable=not show_bar)
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
            speed.leave(self.bytes[corpus.name, side] - sum(written.text_bytes for written in done))
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
        shard = "(?:{})-[0-9]{{5,}}.bin".format("|".join(PARTS))
        own = {self.folder: "|".join(map(re.escape, (MANIFEST, PLAN, PROGRESS)))}
        own |= {self.folder / corpus: shard for corpus in self.plan["corpora"]}
        for folder, names in own.items():
            for path in folder.iterdir() if folder.is_dir() else ():
                if is_unfinished(path.name, names) and not path.is_dir():
                    path.unlink()

    def _forget_broken(self, part: str) -> None:
        """Mark for rewriting all shards from the first one that differs from its note."""
        for index, written in enumerate(self.progress.of(part)):
            path, size = self.folder / written.file, written.tokens * KINDS[self.dtype].itemsize
            whole = path.is_file() and not path.is_symlink() and path.stat().st_size == size
            if not whole or file_hash(path) != written.sha256:
                self.progress.forget(part, index)
                return

    def _manifest(self) -> dict:
        sides = {}
        for documents in self.documents:
            name = documents.corpus.name
            sides[name] = {
                "weight": documents.corpus.weight,
                **{side: _side(self.progress.of(f"{name}/{side}")) for side in PARTS},
                "dropped": dict(documents.dropped),
            }
        facts = provenance()
        return {
            "format": FORMAT,
            "dtype": self.dtype,
            "eos_token_id": document_start(self.tokenizer),
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
    tokens = sum(shard.tokens for shard in shards)
    return {
        "documents": _documents(shards),
        "tokens": tokens,
        "text_bytes": sum(shard.text_bytes for shard in shards),
        "sequences": {str(length): tokens // length for length in _SEQUENCES},
        "shards": [{"file": shard.file, "tokens": shard.tokens, "sha256": shard.sha256} for shard in shards],
    }


def _difference(there: dict, here: dict, name: str = "") -> str:
    """The first difference between two plans, in words; `there` comes from a file and may hold anything."""
    for key in dict.fromkeys([*here, *there]):
        left, right = here.get(key), there.get(key)
        if left == right:
            continue
        if isinstance(left, dict) and isinstance(right, dict):
            return _difference(right, left, f"{name}{key}: ")
        shown = key if key.isprintable() else json.dumps(key)
        return f"{name}{shown} is {_short(right)}, now {_short(left)}"
    raise AssertionError("equal plans")


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _write_json(path: Path, document: dict) -> None:
    replace_text(path, json.dumps(document, indent=2) + "\n")


@dataclass
class Arguments:
    """All flags."""

    tokenizer_name: str = flag(MISSING, "Tokenizer of the model that will be trained (folder or Hub name).")
    output_dir: str = flag(MISSING, "Folder for the shards and their manifest.")
    validation_split_percentage: float = flag(
        1.0, "Percentage of each corpus's documents held out for validation.", above=0, below=100
    )
    max_eval_samples: int = flag(1000, "Validation documents of each corpus at most.", **COUNT)
    seed: int = flag(42, "Seed that draws the documents of corpora with a limit.", **SEED)
    shard_tokens: int = flag(1 << 26, "Tokens after which a shard ends.", least=1 << 10, most=1 << 32)
    num_proc: int = flag(1, "Number of processes that tokenize; one uses all cores with a fast tokenizer.", **THREADS)


# Flags that change what is written.
_SETTINGS = ("seed", "validation_split_percentage", "max_eval_samples", "shard_tokens")


def make_parser() -> Parser:
    """All flags."""
    return Parser(
        Arguments,
        prog="hope-hf prepare",
        usage="%(prog)s mixture.yaml --tokenizer_name NAME --output_dir DIR [flags]",
        description="Tokenize a mixture of corpora into shards.",
        example="hope-hf prepare mix.yaml --tokenizer_name tokenizers/mix --output_dir shards_mix",
        link="docs/data.md",
        allow_abbrev=False,
    )


@program
def main(argv: list[str]) -> int:
    """Returns 0, 1 where memory is full, 2 after a mistake of the user, or 130 after Ctrl-C."""
    # Only the bar of the shards is shown.
    disable_progress_bars()
    try:
        mixture, words = (None, argv) if not argv or argv[0].startswith("-") else (at_home(argv[0]), argv[1:])
        (args,) = make_parser().parse_args_into_dataclasses(words, look_for_args_file=False)
        if mixture is None:
            raise ValueError("The mixture is missing: name a YAML file of corpora as the first argument.")
        check_output(args.output_dir, "--output_dir")
        _prepare(mixture, args)
    except MemoryError:
        return print_error(
            "Memory is full: free some, or lower --num_proc; the same command continues where it stopped.", 1
        )
    except KeyboardInterrupt:
        return print_error("stopped; the same command continues where it stopped.", 130)
    return 0


def _prepare(mixture: str, args: Arguments) -> None:
    corpora = read_mixture(mixture)
    for corpus in corpora:
        if corpus.shards:
            raise ValueError(f"The mixture {mixture}, corpus {corpus.name}, is tokenized already: leave it out.")
    tokenizer = load_tokenizer(args.tokenizer_name)
    folder = Path(args.output_dir)
    lock = FolderLock(folder)
    lock.acquire()
    try:
        require_own(folder)
        share = args.validation_split_percentage
        check_cache(corpora, share, args.seed, tokenizer, folder)
        documents = [open_corpus(corpus, share, args.max_eval_samples, args.seed, tokenizer) for corpus in corpora]
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
        train, validation = corpus["train"], corpus["validation"]
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in corpus["dropped"].items())
        print(
            f"{name}: {train['documents']:,} documents, {train['tokens']:,} tokens in {len(train['shards'])} shards; "
            f"validation {validation['documents']:,}, {validation['tokens']:,}"
            + (f"; dropped: {dropped}" if dropped else "")
        )
    print(f"Train on them with --train_shards {folder}")
