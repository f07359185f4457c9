"""The text that a model is evaluated on."""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from hope_hf.common.files import RUN_FILE, read_small
from hope_hf.common.flags import TextArguments, shown_names
from hope_hf.common.process import MISTAKES, one_line, warn_once
from hope_hf.data import (
    ChatTemplate,
    DataConfig,
    filled_chats,
    find_files,
    load_files,
    load_tokenizer,
    set_chat_template,
    validation_texts,
)

from .flags import NAMING, SHARE, TEXT, Arguments


@dataclass(frozen=True)
class HeldOut:
    """Documents that the model was not trained on."""

    texts: list[str]
    corpora: list[str]
    """The corpus of each document; one name for all where the text is no mixture."""
    source: str
    """Where the documents come from, for people."""
    tokens: list[list[int]] | None = None
    """The token ids of chats, in which only the template's marks are special tokens; None for other text."""

    def head(self, count: int | None) -> "HeldOut":
        """The first `count` documents of every corpus; all for None."""
        number, kept = Counter(), []
        for index, corpus in enumerate(self.corpora):
            number[corpus] += 1
            if count is None or number[corpus] <= count:
                kept.append(index)
        texts, corpora = ([column[index] for index in kept] for column in (self.texts, self.corpora))
        tokens = self.tokens and [self.tokens[index] for index in kept]
        return HeldOut(texts, corpora, self.source, tokens)

    def encoded(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """The token ids of each document; `encode` reads text that is no chat."""
        return list(map(encode, self.texts)) if self.tokens is None else self.tokens


def held_out_documents(args: Arguments) -> HeldOut:
    """All of `--validation_file`, or the documents that a training holds out with the same data flags.

    Without any of these flags, those of the model's own run apply, if its folder has them; the chats of a run with
    `--assistant_only_loss` are filled into the chat template. Of a stream, the first documents are read;
    `--max_eval_samples` limits every corpus. Raises ValueError without text.
    """
    if (run := _run_of(args)) is None:
        return _read(args)
    try:
        flags, chats = _text_of(run, args)
        return _read(replace(args, **flags), chats)
    except ValueError as error:
        raise ValueError(f"The text of {run} cannot be read, name one with --validation_file: {error}") from None


def _run_of(args: Arguments) -> Path | None:
    """The run.json of the run that trained the model; None if a flag names the text."""
    if any(getattr(args, name) for name in NAMING) or not args.model_name_or_path:
        return None
    folder = Path(args.model_name_or_path)
    return next((file for file in (folder / RUN_FILE, folder.parent / RUN_FILE) if file.exists()), None)


def _text_of(run: Path, args: Arguments) -> tuple[dict, bool]:
    """The flags of the text in a run's file, and whether it is chats; flags of `SHARE` that are given now override."""
    defaults, kinds = TextArguments(), get_type_hints(TextArguments)
    try:
        identity = json.loads(read_small(run))["identity"]
        found = {name: identity.get(name, getattr(defaults, name)) for name in (*NAMING, *SHARE)}
        for name, value in found.items():
            if not _fits(value, kinds[name]):
                raise ValueError(f"{name} is {value!r:.80}")
        if not 0 < found["validation_split_percentage"] < 100 or (found["max_eval_samples"] or 1) < 1:
            raise ValueError("the share held out is out of range")
    except MISTAKES as error:
        warn_once(f"{run} does not name the run's text ({one_line(error)}): the built-in corpus is read.")
        return {}, False
    given = {name: getattr(args, name) for name in SHARE if getattr(args, name) != getattr(defaults, name)}
    return found | given, identity.get("assistant_only_loss") is True


def _fits(value: object, kind: object) -> bool:
    """Whether a value from a file is one that a flag of the kind may have."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if isinstance(value, list):
        return list in get_args(kind) and value != [] and all(isinstance(name, str) for name in value)
    return isinstance(value, kind | int if kind is float else kind)


def _read(args: Arguments, chats: bool = False) -> HeldOut:
    name = args.tokenizer_name or args.model_name_or_path if chats else None
    template = None
    if chats:
        tokenizer = load_tokenizer(name, args.trust_remote_code)
        set_chat_template(tokenizer)
        template = ChatTemplate(tokenizer)
    if args.validation_file:
        if args.streaming:
            warnings.warn("--streaming is ignored: --validation_file is read as a whole.", stacklevel=2)
        files = find_files(args.validation_file, "--validation_file", "validation")
        columns = {"column": args.text_column, "on_bad_rows": args.on_bad_rows}
        documents = load_files(files, "--validation_file", **columns, chats=chats, template=template)
        found = {"text": documents["text"][: args.max_eval_samples]}
        source = shown_names(args.validation_file)
    elif args.dataset_name == "synthetic":
        raise ValueError("--dataset_name synthetic is not text: name one with --validation_file.")
    else:
        own = {flag: getattr(args, flag) for flag in TEXT if flag != "validation_file"}
        found, named = validation_texts(DataConfig(**own, assistant_only_loss=chats, tokenizer_name=name))
        source = f"{named}, held-out documents"
    rows = [(text, corpus) for corpus, texts in found.items() for text in texts if text and not text.isspace()]
    if not rows:
        raise ValueError(f"{source} holds no text to evaluate on: give another --validation_file.")
    texts, corpora = map(list, zip(*rows, strict=True))
    if template is None:
        return HeldOut(texts, corpora, source)
    texts, tokens = map(list, zip(*filled_chats(template, texts), strict=True))
    return HeldOut(texts, corpora, f"{source}, chats with all their turns", tokens)
