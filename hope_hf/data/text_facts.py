"""What a run's text was, file by file: not what decides whether it is the same, but what to say where it is not."""

import os
from hashlib import blake2b
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from hope_hf.common.packaged import RECIPES, find_file

from .cache import files_under
from .config import DataConfig
from .file_names import find_files
from .mixture import read_mixture
from .shards import MANIFEST
from .vocabulary import tokenizer_hash

# Bytes that are hashed at each end of a file.
_SAMPLED = 1 << 16


def text_facts(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> dict:
    """JSON-able: by flag [name, bytes, hash of both ends] of every file, in their order, and the tokenizer's hash."""
    facts = {}
    for flag, files in _files(config).items():
        facts[f"--{flag}"] = list(map(file_facts, files))
    facts["tokenizer"] = tokenizer_hash(tokenizer)
    return facts


def change_of_files(config: DataConfig, before: dict) -> str | None:
    """Which file is another one than in `text_facts` of before, and how; None where none is, or nothing is known."""
    if not before:
        return None
    now = {"tokenizer": before.get("tokenizer")}
    for flag, files in _files(config).items():
        now[f"--{flag}"] = list(map(file_facts, files))
    return difference_of_text(before, now)


def file_facts(path: str | Path) -> list:
    """Name, bytes, and a hash of the size and both ends of a file."""
    size = os.path.getsize(path)
    digest = blake2b(str(size).encode(), digest_size=8)
    with open(path, "rb") as file:
        digest.update(file.read(_SAMPLED))
        file.seek(max(0, size - _SAMPLED))
        digest.update(file.read(_SAMPLED))
    return [os.path.basename(path), size, digest.hexdigest()]


def _files(config: DataConfig) -> dict[str, list[str]]:
    files = {}
    if config.train_file:
        files["train_file"] = find_files(config.train_file, "--train_file")
    if config.validation_file:
        files["validation_file"] = find_files(config.validation_file, "--validation_file", "validation")
    if config.dataset_name and os.path.isdir(config.dataset_name):
        files["dataset_name"] = files_under(config.dataset_name)
    if config.train_shards:
        # It has the SHA-256 of every shard.
        files["train_shards"] = [os.path.join(config.train_shards, MANIFEST)]
    if config.dataset_mixture:
        of_mixture = [find_file(config.dataset_mixture, RECIPES)]
        for corpus in read_mixture(config.dataset_mixture, "--dataset_mixture"):
            if corpus.files:
                of_mixture += find_files(corpus.files, f"corpus {corpus.name}: files")
        files["dataset_mixture"] = of_mixture
    return files


def difference_of_text(before: dict, now: dict) -> str | None:
    """Which file differs, and how; None where neither files nor tokenizer do, or nothing is known of before."""
    for flag in dict.fromkeys((*now, *before)):
        if flag != "tokenizer":
            difference = _difference_of_files(before.get(flag, []), now.get(flag, []))
            if difference:
                return f"{flag}: {difference}"
    if before and before.get("tokenizer") != now.get("tokenizer"):
        return "the tokenizer encodes otherwise"
    return None


def _difference_of_files(before: list, now: list) -> str | None:
    """Both are lists of `file_facts`; a file is known by its hash, whatever its name."""
    hashes_before = [content_hash for _, _, content_hash in before]
    hashes_now = [content_hash for _, _, content_hash in now]
    new = _sizes_without(now, hashes_before)
    missing = _sizes_without(before, hashes_now)
    for name, size in new.items():
        size_before = missing.get(name)
        if size_before == size:
            return f"{name} has other text in as many bytes"
        if size_before is not None:
            return f"{name} had {size_before:,} bytes and has {size:,}"
    if len(new) == len(missing) == 1:
        ((old_name, old_size),) = missing.items()
        ((new_name, new_size),) = new.items()
        return f"{old_name} ({old_size:,} bytes) was read, and now {new_name} ({new_size:,} bytes)"
    if new or missing:
        first, *others = new or missing
        more = f", as are {len(others)} more" if others else ""
        return f"{first} is {'new' if new else 'missing'}{more}"
    return "its files are read in another order" if hashes_before != hashes_now else None


def _sizes_without(files: list, hashes: list[str]) -> dict[str, int]:
    """Bytes by name of the files whose hash is not one of `hashes`."""
    return {name: size for name, size, content_hash in files if content_hash not in hashes}
