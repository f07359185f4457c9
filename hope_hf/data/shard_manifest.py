"""The manifest of a folder of shards, and the JSON files beside it: read whole, and checked field by field."""

import json
import os
import re
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from hope_hf.cli.files import is_inside, read_small

from .mixture import check_weights, is_corpus_name, is_weight
from .vocabulary import highest_id

MANIFEST = "manifest.json"
TOKENIZER = "tokenizer"
FORMAT = 1
KINDS = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
PARTS = ("train", "validation")
_LARGEST = 2**62


@dataclass(frozen=True)
class Kind:
    """What a field of a file may hold."""

    words: str
    admits: Callable[[object], bool]


COUNT = Kind("a whole number from 0", lambda value: type(value) is int and 0 <= value <= _LARGEST)
HASH = Kind("a SHA-256", lambda value: isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) is not None)
FILE = Kind("the name of a file in the folder", is_inside)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_LIST = Kind("a list", lambda value: isinstance(value, list))
_SIDE = {"shards": [{"file": FILE, "tokens": COUNT, "sha256": HASH}]}
_CORPUS = {"weight": Kind("null or a weight", lambda value: value is None or is_weight(value))}
# What is read again; the rest of the file is for people.
_MANIFEST = {
    "dtype": Kind(" or ".join(KINDS), lambda value: isinstance(value, str) and value in KINDS),
    # The token that begins every document: EOS, unless the tokenizer begins prompts with another one.
    "eos_token_id": COUNT,
    "tokenizer": {"sha256": HASH},
    "corpora": _OBJECT,
    "plan": _OBJECT,
}


def read_manifest(folder: Path, flag: str) -> dict:
    """The manifest of a folder of shards; ValueError that names the flag, the file and its first wrong field."""
    # Unlike Path.is_dir it answers for a name that is too long, too.
    if not os.path.isdir(folder):
        raise ValueError(f"{flag} {folder} is no folder: name one that python -m hope_hf.data.prepare wrote.")
    path = folder / MANIFEST
    if not os.path.lexists(path):
        raise ValueError(f"{flag} {folder} has no {MANIFEST}: finish it with python -m hope_hf.data.prepare.")
    manifest = read_object(path, flag, "prepare the shards again")
    if manifest.get("format") != FORMAT:
        raise ValueError(f"{flag} {path} is not of this version: prepare the shards again.")
    try:
        check_fields(manifest, _MANIFEST)
        _check_corpora(manifest["corpora"])
        largest = int(np.iinfo(KINDS[manifest["dtype"]]).max)
        if manifest["eos_token_id"] > largest:
            raise ValueError(f"eos_token_id is {manifest['eos_token_id']}, more than {manifest['dtype']} holds")
    except ValueError as error:
        raise ValueError(f"{flag} {path} was not written by prepare, {error}: prepare the shards again.") from None
    return manifest


def read_object(path: Path, flag: str, fix: str) -> dict:
    """The JSON object of a small file. Raises ValueError that names the flag, the file and the fix."""
    try:
        value = json.loads(read_small(path))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
    # RecursionError: thousands of nested brackets.
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{flag} {path} cannot be read, {fix}: {reason}.") from None
    return value


def check_fields(value: object, kinds: "dict | list | Kind", name: str = "") -> None:
    """Check a value against a dict of its required keys, a list of one kind for its items, or a `Kind`.

    Raises ValueError whose text names the first wrong field, for the middle of a sentence.
    """
    if isinstance(kinds, Kind):
        if not kinds.admits(value):
            raise ValueError(f"{name or 'it'} is {reprlib.repr(value)}, not {kinds.words}")
    elif isinstance(kinds, list):
        check_fields(value, _LIST, name)
        for index, item in enumerate(value):
            check_fields(item, kinds[0], f"{name}[{index}]")
    else:
        check_fields(value, _OBJECT, name)
        for key, kind in kinds.items():
            where = f"{name}.{key}" if name else key
            if key not in value:
                raise ValueError(f"{where} is missing")
            check_fields(value[key], kind, where)


def dtype_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The name in `KINDS` of the type that holds the tokenizer's ids."""
    return "uint16" if highest_id(tokenizer) < 1 << 16 else "uint32"


def shard_name(part: str, index: int) -> str:
    """The file of a shard of a part such as web/train, in its folder."""
    return f"{part}-{index:05}.bin"


def _check_corpora(corpora: dict) -> None:
    if not corpora:
        raise ValueError("corpora is empty")
    for name, corpus in corpora.items():
        if not is_corpus_name(name):
            raise ValueError(f"corpora has the name {reprlib.repr(name)}")
        check_fields(corpus, {**_CORPUS, **dict.fromkeys(PARTS, _SIDE)}, f"corpora.{name}")
    check_weights({name: corpus["weight"] for name, corpus in corpora.items()}, "it")
