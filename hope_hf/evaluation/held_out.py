"""The text that a model is evaluated on."""

import json
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from hope_hf.common.files import RUN_FILE, TEXT_FILES, read_small
from hope_hf.common.flags import TextArguments, shown_names
from hope_hf.common.process import MISTAKES, one_line, warn_once
from hope_hf.data import (
    ChatTemplate,
    DataConfig,
    change_of_files,
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
        if count is None:
            return self
        number_of_corpus = Counter()
        first = []
        for index, corpus in enumerate(self.corpora):
            number_of_corpus[corpus] += 1
            if number_of_corpus[corpus] <= count:
                first.append(index)
        tokens = None
        if self.tokens is not None:
            tokens = [self.tokens[index] for index in first]
        texts = [self.texts[index] for index in first]
        corpora = [self.corpora[index] for index in first]
        return HeldOut(texts, corpora, self.source, tokens)

    def encoded(self, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """The token ids of each document; `encode` reads text that is no chat."""
        if self.tokens is not None:
            return self.tokens
        return list(map(encode, self.texts))


def held_out_documents(args: Arguments) -> HeldOut:
    """All of `--validation_file`, or the documents that a training holds out with the same data flags.

    Without any of these flags, those of the model's own run apply, if its folder has them; the chats of a run with
    `--assistant_only_loss` are filled into the chat template. Of a stream, the first documents are read;
    `--max_eval_samples` limits every corpus. Raises ValueError without text.
    """
    run = _run_of(args)
    if run is None:
        return _read(args)
    try:
        flags, chats, files = _text_of(run, args)
        held = _read(replace(args, **flags), chats)
        change = change_of_files(DataConfig(**{flag: flags[flag] for flag in NAMING if flag in flags}), files)
    except ValueError as error:
        raise ValueError(f"The text of {run} cannot be read, name one with --validation_file: {error}") from None
    if change is not None:
        warn_once(
            f"The text of {run} has changed since the training, {change}: the model may have been trained on what is "
            "held out of it now."
        )
    return held


def _run_of(args: Arguments) -> Path | None:
    """The run.json of the run that trained the model; None if a flag names the text."""
    if any(getattr(args, name) for name in NAMING) or not args.model_name_or_path:
        return None
    folder = Path(args.model_name_or_path)
    for file in (folder / RUN_FILE, folder.parent / RUN_FILE):
        if file.exists():
            return file
    return None


def _text_of(run: Path, args: Arguments) -> tuple[dict, bool, dict]:
    """The flags of the text in a run's file, whether it is chats, and what its files were.

    Flags of `SHARE` that are given now override.
    """
    defaults = TextArguments()
    try:
        identity = json.loads(read_small(run))["identity"]
        flags = {}
        for name in (*NAMING, *SHARE):
            flags[name] = identity.get(name, getattr(defaults, name))
        is_chat = identity.get("assistant_only_loss") is True
        files = dict(identity.get(TEXT_FILES) or {})
    except MISTAKES as error:
        warn_once(f"{run} does not name the run's text ({one_line(error)}): the built-in corpus is read.")
        return {}, False, {}
    for name in SHARE:
        if getattr(args, name) != getattr(defaults, name):
            flags[name] = getattr(args, name)
    return flags, is_chat, files


def _read(args: Arguments, chats: bool = False) -> HeldOut:
    name = None
    template = None
    if chats:
        name = args.tokenizer_name or args.model_name_or_path
        tokenizer = load_tokenizer(name, args.trust_remote_code)
        set_chat_template(tokenizer)
        template = ChatTemplate(tokenizer)
    if args.validation_file:
        if args.streaming:
            warnings.warn("--streaming is ignored: --validation_file is read as a whole.", stacklevel=2)
        files = find_files(args.validation_file, "--validation_file", "validation")
        documents = load_files(
            files,
            "--validation_file",
            column=args.text_column,
            on_bad_rows=args.on_bad_rows,
            chats=chats,
            template=template,
        )
        by_corpus = {"text": documents["text"][: args.max_eval_samples]}
        source = shown_names(args.validation_file)
    elif args.dataset_name == "synthetic":
        raise ValueError("--dataset_name synthetic is not text: name one with --validation_file.")
    else:
        flags = {flag: getattr(args, flag) for flag in TEXT if flag != "validation_file"}
        config = DataConfig(**flags, assistant_only_loss=chats, tokenizer_name=name)
        by_corpus, named = validation_texts(config)
        source = f"{named}, held-out documents"
    texts = []
    corpora = []
    for corpus, documents in by_corpus.items():
        for text in documents:
            if text and not text.isspace():
                texts.append(text)
                corpora.append(corpus)
    if not texts:
        raise ValueError(f"{source} holds no text to evaluate on: give another --validation_file.")
    if template is None:
        return HeldOut(texts, corpora, source)
    texts, tokens = map(list, zip(*filled_chats(template, texts), strict=True))
    return HeldOut(texts, corpora, f"{source}, chats with all their turns", tokens)
