"""Byte-level BPE: trained, saved and loaded.

Encoding and decoding leave any text unchanged. `<|endoftext|>` begins every document and is what the
model predicts at its end (so it is the BOS and the EOS token, as in GPT-2); `<|pad|>` fills batches.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hope_hf.common.files import disk_errors
from hope_hf.common.flags import require_local
from hope_hf.common.models import place_of_tokenizer
from hope_hf.common.process import first_line, warn_once
from hope_hf.common.tokenizer_files import read_tokenizer

from .sizes import DEFAULT_VOCAB_SIZE, SMALLEST_VOCABULARY

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
_LONGEST_WORD = 1 << 10
# A word of byte-level BPE: letters, digits, other signs or spaces.
_ONE_WORD = re.compile(r"[^\W\d_]+|\d+|[^\w\s]+|_+|\s+")
# Settings that a call leaves in a tokenizer; they change no ids here.
_CALLS = {"truncation": None, "padding": None}


def train_tokenizer(texts: Iterable[str], vocab_size: int = DEFAULT_VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A byte-level BPE with at most `vocab_size` entries, special tokens included; equal texts give equal tokenizers.

    There are fewer entries if the texts have no more pairs to merge. Raises ValueError below 258 entries.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"--config_overrides: vocab_size {vocab_size} is too small for a byte-level tokenizer made from the text: "
            f"give {SMALLEST_VOCABULARY} or more, or a --tokenizer_name."
        )
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        # All 256 bytes, in a fixed order: every text can be encoded, and the ids do not depend on a set's order.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(chain.from_iterable(map(_without_long_words, texts)), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )


def _without_long_words(text: str) -> Iterator[str]:
    """The text, cut so that no word is much longer than `_LONGEST_WORD`: time grows with the square of the length."""
    begin = 0
    for place in range(0, len(text) - _LONGEST_WORD, _LONGEST_WORD):
        end = place + _LONGEST_WORD
        if _ONE_WORD.fullmatch(text, place, end):
            warn_once(
                f"The text has words of more than {_LONGEST_WORD:,} characters without a space: the tokenizer learns "
                "from their parts."
            )
            yield text[begin:end]
            begin = end
    yield text[begin:]


def load_tokenizer(name: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub name. Raises ValueError if there is none, or it has no EOS token."""
    require_local(name, "--tokenizer_name")
    try:
        tokenizer = read_tokenizer(place_of_tokenizer(name), trust_remote_code)
        # Some settings of a wrong type fail only here, and a file may name a class that is not a tokenizer.
        tokenizer(END_OF_TEXT)["input_ids"]
    # The tokenizers library raises a bare Exception for a file that it cannot read.
    except Exception as error:
        raise ValueError(
            f"--tokenizer_name {name} holds no tokenizer that can be loaded: {first_line(error)}"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(
            f"--tokenizer_name {name} has no EOS token to put between documents: set its eos_token and save it."
        )
    return tokenizer


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, output_dir: str | Path):
    """Write tokenizer.json and tokenizer_config.json. Raises ValueError if another tokenizer is there."""
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output_dir {folder} is a file: name a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Written to a temporary folder, then moved: a full disk leaves no partial tokenizer that blocks the next try.
        with tempfile.TemporaryDirectory(dir=folder, prefix=".tokenizer-") as scratch:
            with disk_errors():
                tokenizer.save_pretrained(scratch)
            files = sorted(Path(scratch).iterdir())
            for written in files:
                target = folder / written.name
                # Reading a pipe would block for ever.
                if target.exists() and not (target.is_file() and target.read_bytes() == written.read_bytes()):
                    raise ValueError(
                        f"--output_dir {folder} holds another tokenizer ({written.name} differs): "
                        "name another folder or remove that one."
                    )
            for written in files:
                written.replace(folder / written.name)
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be written: {error.strerror or error}.") from None


def check_vocabulary(tokenizer: PreTrainedTokenizerBase, vocab_size: int):
    """Raise ValueError if the tokenizer's ids go beyond the model's `vocab_size` embeddings."""
    highest = highest_id(tokenizer)
    if highest >= vocab_size:
        name = tokenizer.name_or_path or "the tokenizer made from the text"
        raise ValueError(
            f"--tokenizer_name: {name} has ids up to {highest}, but the model's vocab_size is {vocab_size}: use the "
            "model's own tokenizer or, for a new model, raise vocab_size with --config_overrides."
        )


def warn_of_other_tokenizer(tokenizer: PreTrainedTokenizerBase, model: str) -> None:
    """A warning if the folder of a trained model has a tokenizer that turns text into other ids."""
    if not os.path.isfile(os.path.join(model, "tokenizer.json")):
        return
    try:
        own = load_tokenizer(model)
    except ValueError:
        # which may be why another one is named
        return
    if tokenizer_hash(own) != tokenizer_hash(tokenizer):
        warn_once(
            f"--tokenizer_name: {tokenizer.name_or_path} is another tokenizer than that in {model}, to which its ids "
            "mean other tokens."
        )


def highest_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The highest id, which may be above the number of entries."""
    return max(tokenizer.get_vocab().values())


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 of all settings that turn text into ids: equal for a tokenizer and its saved copy."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = tokenizer.get_vocab() if backend is None else {**json.loads(backend.to_str()), **_CALLS}
    parts = json.dumps([rules, tokenizer.eos_token_id], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()


def bytes_per_id(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Bytes of text of each id up to the highest; 0 for special tokens, and for ids that are none.

    Exact for byte-level BPE, where every character of an entry is one byte, but not of a token that was added. For
    other kinds the entry's text is counted, with the word mark `▁` as a space and `<0x41>` as one byte.
    """
    entries = [None] * (highest_id(tokenizer) + 1)
    for entry, index in tokenizer.get_vocab().items():
        entries[index] = entry
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    byte_level = backend is not None and "ByteLevel" in repr(backend.decoder)
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    sizes = []
    for index, entry in enumerate(entries):
        if index in special or entry is None:
            sizes.append(0)
        else:
            is_bytes = byte_level and index not in added and alphabet.issuperset(entry)
            sizes.append(_bytes_of_entry(entry, is_bytes))
    return sizes


def _bytes_of_entry(entry: str, byte_level: bool) -> int:
    if byte_level:
        return len(entry)
    if len(entry) == 6 and entry.startswith("<0x"):
        return 1
    return len(entry.replace("▁", " ").encode("utf-8"))
