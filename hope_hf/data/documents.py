"""Documents of a data set, of files or of the built-in corpus, and which of them are for validation."""

import ast
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import filterfalse, islice
from pathlib import Path

from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError, SplitsVerificationError

from hope_hf.common.flags import is_hub_name, is_missing, shown_names
from hope_hf.common.process import first_line, warn_once

from .cache import DISK_ERRORS, cache_for, files_under, plain_name, writable_cache
from .chat_template import ChatTemplate
from .config import DataConfig
from .file_kinds import kind_of
from .file_names import find_files, named_files
from .files import chat_column, load_files, read_stream, text_column
from .saved_folder import is_saved, load_saved

# Left out: test packages (mostly data and expected outputs), installed packages (site-packages), modules that some
# distributions of Python split off or later versions dropped (the corpus should be nearly the same everywhere), tables
# of characters, and files generated for one machine.
_LEFT_OUT = frozenset(
    "test tests idle_test site-packages dist-packages lib-dynload __pycache__ __phello__ "
    "idlelib tkinter turtledemo ensurepip distutils lib2to3 encodings pydoc_data".split()
)
_GENERATED = ("config-", "_sysconfigdata")
# Where one long text may be split, with the blanks that follow.
_BLANK_LINES = re.compile(r"\n[ \t\r]*+\n\s*+")
_LINE_END = re.compile(r"\n\s*+")
_SPACE = re.compile(r"\s++")
HELD_OUT_OF_A_STREAM = 256
"""Validation documents of a stream without a limit."""


def corpus_documents() -> list[tuple[str, str]]:
    """(name, text) of every document, about 8 MB in 460 of them, ordered by name.

    A document is a source file of the standard library, named by its path there (`asyncio/events.py`), or a chapter of
    the language reference behind `help()` (`pydoc_data/topics/while`). Nothing is imported or executed.
    Raises ValueError if this Python carries no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = {}
    # Not Path.rglob, which would look through all installed packages: they lie in a folder that is left out.
    for folder, folders, files in os.walk(root):
        folders[:] = filterfalse(_is_left_out, folders)
        for file in filterfalse(_is_left_out, files):
            path = Path(folder, file)
            if path.suffix == ".py":
                documents[path.relative_to(root).as_posix()] = path.read_bytes().decode("utf-8", errors="replace")
    topics = root / "pydoc_data" / "topics.py"
    if not documents or not topics.is_file():
        raise ValueError(f"This Python has no standard library sources in {root}: name a text with --train_file.")
    for node in ast.parse(topics.read_text("utf-8")).body:
        # The one assignment of the file is a table of chapters.
        if isinstance(node, ast.Assign):
            for name, text in ast.literal_eval(node.value).items():
                documents[f"pydoc_data/topics/{name}"] = text
    return [(name, text) for name, text in sorted(documents.items()) if text.strip()]


def _is_left_out(name: str) -> bool:
    return name in _LEFT_OUT or name.startswith(_GENERATED)


def held_out(key: str, percentage: float) -> bool:
    """Whether the document with this key (its text, or its name) belongs to validation."""
    return _share(key) < percentage / 100


def split_documents(keys: Iterable[str], percentage: float) -> tuple[list[int], list[int]]:
    """Indices of (training, validation) documents; neither is empty if there are two different keys.

    The split is by hash of the key, not by position. So copies of a document are on the same side, and adding or
    removing documents moves no other one. Blank keys belong to neither side.
    """
    shares = {index: _share(key) for index, key in enumerate(keys) if key and not key.isspace()}
    lowest = min(shares.values(), default=0)
    highest = max(shares.values(), default=0)
    train = []
    validation = []
    for index, share in shares.items():
        # Of a few documents none or all may be below the percentage: the lowest is always held out, the highest never.
        if share != highest and (share < percentage / 100 or share == lowest):
            validation.append(index)
        else:
            train.append(index)
    return train, validation


def _share(key: str) -> float:
    digest = blake2b(key.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


@dataclass
class Sources:
    """Documents as data sets with the one column `text`."""

    train: Dataset | IterableDataset
    validation: Dataset
    description: str
    """Where they come from, for people."""


def open_sources(config: DataConfig, template: ChatTemplate | None = None) -> Sources:
    """Find and split the documents that `config` names; raises ValueError naming the flag or file.

    template: that of chats, which must not fail on them.
    """
    held = None
    if config.dataset_name:
        train, held, description = _from_hub(config, template)
    elif config.train_file:
        train, description = _load(config.train_file, "--train_file", config, template, streaming=config.streaming)
    else:
        if config.streaming:
            warnings.warn("--streaming is ignored: the built-in corpus is read as a whole.", stacklevel=2)
        train = builtin_corpus()
        description = "built-in corpus"
    if config.validation_file:
        held, _ = _load(config.validation_file, "--validation_file", config, template, split="validation")
        description += f", validation {shown_names(config.validation_file)}"
        if config.train_file:
            _warn_of_shared_files(config)
    if isinstance(train, IterableDataset):
        train, held = _split_stream(train, held, config)
    elif held is None:
        source = f"{_flag(config)} {description}"
        train, held = split_training(
            train, config.validation_split_percentage, source, chats=config.assistant_only_loss
        )
    return Sources(_first(train, config.max_train_samples), _first(held, config.max_eval_samples), description)


def _load(
    names: str | list[str],
    flag: str,
    config: DataConfig,
    template: ChatTemplate | None,
    split: str = "train",
    streaming: bool = False,
) -> tuple[Dataset | IterableDataset, str]:
    """The documents of files, and for people what they are."""
    files = find_files(names, flag, split)
    documents = load_files(
        files, flag, streaming, config.text_column, config.on_bad_rows, config.assistant_only_loss, template
    )
    description = shown_names(names)
    return documents, f"{description} ({len(files)} files)" if len(files) > 1 else description


def _warn_of_shared_files(config: DataConfig) -> None:
    trained_on = set(map(os.path.realpath, named_files(config.train_file, "--train_file")))
    for path in named_files(config.validation_file, "--validation_file", "validation"):
        if os.path.realpath(path) in trained_on:
            warn_once(f"--validation_file {path} is also read by --train_file: the model is trained on it.")


def training_source(config: DataConfig) -> str:
    """Flag and value that name the training text, for error messages."""
    return f"{_flag(config)} {config.dataset_name or shown_names(config.train_file)}"


def builtin_corpus() -> Dataset:
    """The built-in corpus, with the columns `text` and `name`."""
    names, texts = zip(*corpus_documents(), strict=True)
    return Dataset.from_dict({"text": texts, "name": names})


def load_data_set(source: str, name: str, config_name: str | None, split: str | None = None, **options):
    """`datasets.load_dataset`, which also reads a folder that `save_to_disk` wrote: all its splits, or one.

    Raises ValueError that names `source` if it cannot be loaded.
    """
    if is_saved(name):
        for option, value in (("data_dir", options.get("data_dir")), ("dataset_config_name", config_name)):
            if value:
                raise ValueError(f"{source} is a folder of save_to_disk, which has no {option}: leave it out.")
        return load_saved(name, source, split, options.get("streaming", False))
    if is_missing(name) or (not os.path.exists(name) and not is_hub_name(name)):
        raise ValueError(f"{' '.join(source.split())} is neither a folder nor a data set's name on the Hub: check it.")
    writable_cache()
    if os.path.isdir(name):
        files = files_under(name)
        _warn_of_kinds(files, source)
        options["cache_dir"] = cache_for(files)
        name = plain_name(name)
    try:
        return load_dataset(name, config_name, split=split, **options)
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        raise ValueError(f"{source} {_reason_and_fix(error)}") from error


def _warn_of_kinds(files: list[str], source: str) -> None:
    """Warn of what `datasets` makes of a folder that does not say how it is read."""
    kinds = {}
    for file in files:
        name = os.path.basename(file)
        if name == "README.md" and "configs:" in Path(file).read_text("utf-8", errors="replace"):
            return
        if kind_of(file) is not None and not name.startswith("dataset_info"):
            kinds[kind_of(file)] = name
    if list(kinds) == ["text"]:
        warn_once(f"{source}: each line of {kinds['text']} is a document; for one a file name it with --train_file.")
    # A licence is a .txt, too.
    kinds.pop("text", None)
    if len(kinds) > 1:
        names = " and ".join(kinds.values())
        warn_once(f"{source} holds files of several kinds, such as {names}, and one kind is read: name files instead.")


def _reason_and_fix(error: Exception) -> str:
    """Why `load_dataset` failed, and what helps."""
    message = str(error)
    cause = error.__cause__ or error
    if isinstance(error, SplitsVerificationError):
        return (
            "has other splits or row counts than its README.md states, perhaps because the copy is incomplete: copy "
            "the rest, or name its files instead."
        )
    if "Config name is missing" in message:
        names = message.splitlines()[1].partition(": ")[2]
        return f"has several configurations: name one of {names} (dataset_config_name)."
    if "scripts are no longer supported" in message:
        return f"needs its program {message.split()[-1]}, which is not run: name its files instead."
    if isinstance(cause, OSError) and cause.errno in DISK_ERRORS:
        return (
            f"could not be stored, {cause.filename or 'the cache'} cannot be written ({cause.strerror}): name a "
            "folder with room in HF_HOME."
        )
    return f"could not be loaded, check its name and the connection: {first_line(cause)}"


def _from_hub(config: DataConfig, template: ChatTemplate | None):
    name = config.dataset_name
    source = f"--dataset_name {name}" + (f" ({config.dataset_config_name})" if config.dataset_config_name else "")
    splits = load_data_set(source, name, config.dataset_config_name, streaming=config.streaming)
    if "train" not in splits:
        raise ValueError(f"{source} has no split 'train' among {', '.join(splits)}: name its files with --train_file.")
    texts = partial(text_column, column=config.text_column)
    if config.assistant_only_loss:
        skip = config.on_bad_rows == "skip"
        texts = partial(chat_column, column=config.text_column, skip=skip, template=template)
    held = texts(splits["validation"], source) if "validation" in splits else None
    return texts(splits["train"], source), held, source.removeprefix("--dataset_name ")


def split_training(documents: Dataset, percentage: float, source: str, chats: bool = False) -> tuple[Dataset, Dataset]:
    """Training and validation documents, by hash of their text or name; ValueError names `source` if one is empty.

    A single document is split in two, unless it is a chat.
    """
    key = "name" if "name" in documents.column_names else "text"
    train, held = split_documents(documents[key], percentage)
    if not train:
        raise ValueError(f"{source} holds no text: give a file with text.")
    if held:
        texts = documents.select_columns(["text"])
        return texts.select(train), texts.select(held)
    if chats:
        raise ValueError(
            f"{source} holds one chat, or the same chat several times, of which none can be held out for validation: "
            "add other chats or, with --train_file, pass --validation_file."
        )
    parts = _two_parts(documents[train[0]]["text"], percentage)
    if parts is None:
        raise ValueError(
            f"{source} holds one document, which cannot be split into training and validation: add documents or, with "
            "--train_file, pass --validation_file."
        )
    return Dataset.from_dict({"text": parts[:1]}), Dataset.from_dict({"text": parts[1:]})


def _two_parts(text: str, percentage: float) -> tuple[str, str] | None:
    """Head and tail of one text, the tail about `percentage` of it: between half and one and a half times as much.

    They meet after a blank line, or if there is none there, after a line or a word. A short text without any of them
    there is split at the nearest blank line. None if nothing splits the text.
    A book in one file is the usual case: its paragraphs stay together as one document on each side.
    """
    # Blanks before the first word and after the last one do not count.
    begin = len(text) - len(text.lstrip())
    end = len(text.rstrip())
    target = round(len(text) * (1 - percentage / 100))
    room = min(target - begin, end - target) / 2
    first = max(begin, int(target - room))
    for pattern in (_BLANK_LINES, _LINE_END, _SPACE):
        cut = _nearest_break(text, pattern, first, end, target + room, target)
        if cut:
            return text[:cut], text[cut:]
    cut = _nearest_break(text, _BLANK_LINES, begin, end, end, target)
    return (text[:cut], text[cut:]) if cut else None


def _nearest_break(text: str, pattern: re.Pattern, first: int, end: int, last: float, target: int) -> int | None:
    """The end of the match nearest to `target`, of those that begin at `first` or later and end by `last`."""
    nearest = None
    for match in pattern.finditer(text, first, end):
        cut = match.end()
        if cut > last:
            break
        if nearest is None or abs(cut - target) < abs(nearest - target):
            nearest = cut
    return nearest


def _split_stream(train: IterableDataset, held: Dataset | IterableDataset | None, config: DataConfig):
    percentage = config.validation_split_percentage
    if held is None:
        held = train.filter(partial(_is_held_out, percentage))
        train = train.filter(partial(_is_trained_on, percentage))
    if isinstance(held, IterableDataset):
        rows = read_stream(held, training_source(config))
        texts = [row["text"] for row in islice(rows, config.max_eval_samples or HELD_OUT_OF_A_STREAM)]
        if not texts:
            raise ValueError(
                f"--streaming found no document to hold out among {percentage:g} % of {_flag(config)}: "
                "raise --validation_split_percentage or pass --validation_file."
            )
        held = Dataset.from_dict({"text": texts})
    return train, held


def _is_held_out(percentage: float, row: dict) -> bool:
    return held_out(row["text"] or "", percentage)


def _is_trained_on(percentage: float, row: dict) -> bool:
    return not _is_held_out(percentage, row)


def _first(documents, count: int | None):
    if count is None:
        return documents
    if isinstance(documents, IterableDataset):
        return documents.take(count)
    return documents.select(range(min(count, len(documents))))


def _flag(config: DataConfig) -> str:
    return "--dataset_name" if config.dataset_name else "--train_file"
