"""What a run's text was, file by file: not what decides whether it is the same, but what to say where it is not."""

import os
from hashlib import blake2b
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from .cache import files_under
from .config import DataConfig
from .files import find_files
from .mixture import read_mixture
from .shards import MANIFEST
from .vocabulary import tokenizer_hash

# Bytes that are hashed at each end of a file.
_SAMPLED = 1 << 16


def text_facts(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> dict:
    """JSON-able: by flag [name, bytes, hash of both ends] of every file, in their order, and the tokenizer's hash."""
    found = {f"--{flag}": list(map(file_facts, files)) for flag, files in _files(config).items()}
    return {**found, "tokenizer": tokenizer_hash(tokenizer)}


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
    found = {}
    for flag in ("train_file", "validation_file"):
        if names := getattr(config, flag):
            split = "train" if flag == "train_file" else "validation"
            found[flag] = find_files(names, f"--{flag}", split)
    if config.dataset_name and os.path.isdir(config.dataset_name):
        found["dataset_name"] = files_under(config.dataset_name)
    if config.train_shards:
        # It has the SHA-256 of every shard.
        found["train_shards"] = [os.path.join(config.train_shards, MANIFEST)]
    if config.dataset_mixture:
        corpora = read_mixture(config.dataset_mixture, "--dataset_mixture")
        named = (find_files(corpus.files, f"corpus {corpus.name}: files") for corpus in corpora if corpus.files)
        found["dataset_mixture"] = [config.dataset_mixture, *(file for files in named for file in files)]
    return found


def difference_of_text(before: dict, now: dict) -> str | None:
    """Which file differs, and how; None where neither files nor tokenizer do, or nothing is known of before."""
    for flag in dict.fromkeys((*now, *before)):
        if flag == "tokenizer" or before.get(flag) == now.get(flag):
            continue
        if said := _difference_of_files(before.get(flag, []), now.get(flag, [])):
            return f"{flag}: {said}"
    if before and before.get("tokenizer") != now.get("tokenizer"):
        return "the tokenizer encodes otherwise"
    return None


def _difference_of_files(before: list, now: list) -> str | None:
    ends = [[end for *_, end in files] for files in (before, now)]
    old, new = ({name: size for name, size, end in files} for files in (before, now))
    changed = [name for name, size, end in now if end not in ends[0]]
    gone = [name for name, size, end in before if end not in ends[1]]
    for name in changed:
        if name in gone and old[name] != new[name]:
            return f"{name} had {old[name]:,} bytes and has {new[name]:,}"
        if name in gone:
            return f"{name} has other text in as many bytes"
    if len(changed) == len(gone) == 1:
        return f"{gone[0]} ({old[gone[0]]:,} bytes) was read, and now {changed[0]} ({new[changed[0]]:,} bytes)"
    if changed:
        return f"{changed[0]} is new" + (f", as are {len(changed) - 1} more" if len(changed) > 1 else "")
    if gone:
        return f"{gone[0]} is missing" + (f", as are {len(gone) - 1} more" if len(gone) > 1 else "")
    return "its files are read in another order" if ends[0] != ends[1] else None
