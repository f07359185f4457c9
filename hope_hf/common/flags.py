"""Flags that several programs have, named as in transformers' ``run_clm.py``; bounds and checks of their values."""

import argparse
import math
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from .files import at_home
from .process import warn_once

# The largest count, rate or number of seconds: sums and products of such numbers do not overflow.
LARGEST = 10**9
# The most tokens of one text: the longest trained on or evaluated so far, and still within a machine's memory.
LONGEST = 2**24
# Ten times the largest in use; the trainer of tokenizers reserves memory for all entries at once.
LARGEST_VOCABULARY = 10_000_000

# The help of a flag that several programs have, and bounds that several flags share.
DEVICE = "cpu, cuda, cuda:1, ... (default: the accelerator, if there is one)."
COUNT = {"least": 1}
OR_NONE = {"least": 0}
THREADS = {"least": 1, "most": 1024}
ROWS = {"least": 1, "most": 65_536}
# numpy's seeds end at 2^32 - 1, and every process adds its rank.
SEED = {"least": 0, "most": 4_000_000_000}

# Flags that name the training text (a run has one), and why other flags are ignored beside each.
TEXT_SOURCES = {
    "dataset_name": {"on_bad_rows": "it is for rows of files"},
    "train_file": {},
    "dataset_mixture": {
        "max_train_samples": "the mixture has max_documents for each corpus",
        "text_column": "the mixture has text_column for each corpus",
        "on_bad_rows": "the mixture has on_bad_rows for each corpus",
    },
    "train_shards": {
        "text_column": "the shards are already tokenized",
        "on_bad_rows": "the shards are already tokenized",
        "preprocessing_num_workers": "the shards are already tokenized",
        "max_train_samples": "the shards are read whole",
        "validation_split_percentage": "the shards hold their own validation text",
    },
}
STREAMED = ("dataset_name", "train_file")
# Flags that describe one text: another text on the command line replaces all of them.
OF_ONE_TEXT = (
    *TEXT_SOURCES,
    "dataset_config_name",
    "validation_file",
    "text_column",
    "on_bad_rows",
    "validation_split_percentage",
    "max_train_samples",
    "streaming",
)


@dataclass(frozen=True)
class Bounds:
    """The finite numbers that a flag accepts: from `least` or above `above`, up to `most` or below `below`."""

    least: float | None = None
    above: float | None = None
    most: float = LARGEST
    below: float | None = None

    def admit(self, value: float) -> bool:
        """Whether `value` is within the bounds; NaN never is."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and value <= self.most
        )

    def words(self, value: float = 0) -> str:
        """The bounds in words: `of 0 or more and below 1`. `LARGEST` is named only if `value` exceeds it."""
        has_least = self.above is None
        low = f"of {self.least:,} or more" if has_least else f"above {self.above:,}"
        if self.below is not None:
            return f"{low} and below {self.below:,}"
        if self.most == LARGEST and not LARGEST < value < math.inf:
            return low
        if has_least:
            return f"from {self.least:,} to {self.most:,}"
        return f"{low} and at most {self.most:,}"


class Checked(argparse.Action):
    """Stores a value that is not blank and is within `bounds`; otherwise ValueError that names the flag.

    `~` at the beginning of a value is the user's folder, since most words name files; not in one that `is_text`.
    """

    def __init__(self, option_strings, dest, bounds: Bounds | None = None, is_text: bool = False, **options):
        super().__init__(option_strings, dest, **options)
        self.bounds, self.is_text = bounds, is_text

    def __call__(self, parser, namespace, values, option_string=None):
        if isinstance(values, list):
            checked = list(map(self._checked, values))
        else:
            checked = self._checked(values)
        setattr(namespace, self.dest, checked)

    def _checked(self, value):
        """The value, with the user's folder for `~`."""
        name = self.option_strings[0] if self.option_strings else self.metavar
        if isinstance(value, str):
            if not value.strip():
                raise ValueError(f"{name} is {value!r}: give a value, or leave it out.")
            # Bytes of a command line that are not UTF-8 become surrogates, which cannot be written to a report.
            if "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
                raise ValueError(f"{name} {value!r} is not UTF-8 text: give another value.")
        elif not self.bounds.admit(value):
            kind = "whole number" if isinstance(value, int) else "number"
            raise ValueError(f"{name} is {value}: give a {kind} {self.bounds.words(value)}.")
        return at_home(value) if isinstance(value, str) and not self.is_text else value


class Several(Checked):
    """Stores a flag's one value, or a list if it has several, after one flag or after several."""

    def __call__(self, parser, namespace, values, option_string=None):
        before = getattr(namespace, self.dest)
        values = values if before is None else [*as_list(before), *values]
        super().__call__(parser, namespace, values if len(values) > 1 else values[0], option_string)


def files_flag(help: str):
    """The dataclass field of a flag that names files: None, a name, or a list of names."""
    return field(default=None, metadata={"help": help, "action": Several, "nargs": "+"})


def as_list(names: str | list[str]) -> list[str]:
    """The values of a flag that has one or several."""
    return names if isinstance(names, list) else [names]


def shown_names(names: str | list[str]) -> str:
    """The values of a flag that has one or several, for people."""
    return " ".join(as_list(names))


def flag(default, help: str, is_text: bool = False, **bounds):
    """The dataclass field of a flag: default (MISSING: required), `--help` line and, for a number, `Bounds`.

    `is_text`: a value is words of the user's, and never a path. The parser calls `Checked` with every value that it
    reads.
    """
    if isinstance(default, bool):
        return field(default=default, metadata={"help": help})
    limits = Bounds(**bounds) if bounds else None
    shown = f"{help} [{limits.words().removeprefix('of ')}]" if limits else help
    return field(default=default, metadata={"help": shown, "action": partial(Checked, bounds=limits, is_text=is_text)})


@dataclass
class ModelArguments:
    """Which model is trained. Without any of them: a new HOPE of the size `tiny`."""

    _argument_group_name = "model"

    model_name_or_path: str | None = flag(None, "Start from these weights (folder or Hub name) instead of new ones.")
    config_name: str | None = flag(None, "Config of a new model: folder, Hub name, or HOPE size (tiny, pilot, ...).")
    config_overrides: str | None = flag(
        None, "Fields of a new model's config: 'hidden_size=256,num_hidden_layers=4' or a JSON object."
    )
    model_type: str | None = flag(None, "Architecture of a new model: hope (default) or any other causal LM.")
    tokenizer_name: str | None = flag(None, "Tokenizer, if not the model's own (folder or Hub name).")
    trust_remote_code: bool = flag(False, "Allow model code from the Hub to run on this machine.")
    attn_implementation: str | None = flag(None, "Attention kernel: sdpa, eager, flash_attention_2, ...")


@dataclass
class TextArguments:
    """Which text is read. Without a data set or file: the built-in corpus."""

    _argument_group_name = "data"

    # The parser takes the second type for that of one value.
    train_file: list | str | None = files_flag(
        "Training text: .txt, .json, .jsonl, .csv, .tsv or .parquet, also as .gz or .zst; names and quoted patterns."
    )
    dataset_name: str | None = flag(None, "Hub name or folder of a data set; 'synthetic' gives seeded random tokens.")
    dataset_config_name: str | None = flag(None, "Configuration of that data set.")
    dataset_mixture: str | None = flag(None, "YAML file that mixes several corpora, see docs/data.md.")
    train_shards: str | None = flag(None, "Folder of token shards that hope-hf prepare wrote.")
    validation_file: list | str | None = files_flag("Validation text, in the same formats.")
    text_column: str | None = flag(None, "Column of the text (default: text, or the only one of strings).")
    on_bad_rows: Literal["error", "skip"] = flag(
        "error", "Rows of a file that cannot be parsed or hold no text. skip: count them and go on."
    )
    validation_split_percentage: float = flag(
        5.0, "Percentage of the training documents held out if there is no validation set.", above=0, below=100
    )
    max_train_samples: int | None = flag(None, "Use only the first N training documents.", **COUNT)
    max_eval_samples: int | None = flag(None, "Use only the first N validation documents.", **COUNT)
    streaming: bool = flag(False, "Read the data set as a stream; training needs --max_train_steps.")
    preprocessing_num_workers: int | None = flag(None, "Number of processes that tokenize.", **THREADS)


def check_streaming(args: TextArguments) -> None:
    """Raise ValueError if `--streaming` is given for text that cannot be read as a stream."""
    if args.streaming and any(getattr(args, name) for name in TEXT_SOURCES if name not in STREAMED):
        raise ValueError(f"--streaming is for {' and '.join(f'--{name}' for name in STREAMED)}: leave it out.")


def warn_of_text_flags(args: TextArguments, named: set[str]) -> None:
    """Warn of the flags among `named` that have no effect on the text that is read."""
    reasons = {"validation_split_percentage": "--validation_file is given"} if args.validation_file else {}
    for source, ignored in TEXT_SOURCES.items():
        reasons |= ignored if getattr(args, source) else {}
    for name in sorted(named & reasons.keys()):
        warn_once(f"--{name} is ignored: {reasons[name]}.")


def check_output(path: str, flag: str):
    """Raise ValueError that names `flag` if `path` is a file, or no folder can be made or written there."""
    folder = Path(path)
    try:
        for place in (folder, *folder.absolute().parents):
            if place.is_symlink() and not place.exists():
                raise ValueError(f"{flag} {folder} cannot be written: {place} is a link to nothing.")
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{flag} {folder} is a file: name a folder.")
        nearest = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    except OSError as error:
        # The name is too long.
        raise ValueError(f"{flag} {folder} cannot be written: {error.strerror}.") from None
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise ValueError(f"{flag} {folder} cannot be written: {nearest} is a file or read-only.")


def parse_numbers(text: str | None, flag: str, least: int) -> tuple[int, ...]:
    """Whole numbers between commas, each at least `least` and given once; none for `None`."""
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) < 10 and int(word) >= least for word in words):
        raise ValueError(
            f"{flag} is {text!r}: write whole numbers of {least} or more, such as {least or 2},{least + 8}."
        )
    numbers = tuple(map(int, words))
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"{flag} is {text!r}, which has a number twice: leave one of the two out.")
    return numbers


def check_repo_id(repo_id: str, flag: str):
    """Raise ValueError that names `flag` if `repo_id` is not a valid repository name, with or without owner."""
    if not _is_repo_id(repo_id):
        raise ValueError(
            f"{flag} {repo_id!r} is not a name of a repository: write owner/name in letters, digits, '-', '_' and '.'."
        )


def is_hub_name(name: str) -> bool:
    """Whether `name` is a valid repository name and not a local file or folder."""
    return _is_repo_id(name) and not os.path.exists(name)


def _is_repo_id(name: str) -> bool:
    # Not at the top: few flags name repositories.
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_missing(name: str) -> bool:
    """Whether `name` is meant as a path and nothing is there: the Hub, where retries take a minute, is not asked.

    Such names begin with `.`, `/` or `~`, or their first folder is here.
    """
    first, *others = Path(name).parts or ("",)
    is_path = name.startswith((".", "/", "~")) or (bool(others) and os.path.isdir(first))
    return is_path and not os.path.exists(name)


def require_local(name: str, named: str) -> None:
    """Raise ValueError that begins with `named` if `name` is meant as a path and nothing is there, or is a file.

    A config or tokenizer may be one file of JSON.
    """
    if os.path.isfile(name) and not name.endswith(".json"):
        raise ValueError(f"{named} {name} is a file: name its folder.")
    if is_missing(name):
        nearest = next(parent for parent in Path(name).parents if os.path.exists(parent))
        raise ValueError(
            f"{named} {name} does not exist, and {nearest} does: look for the name there, or give one of the Hub."
        )
