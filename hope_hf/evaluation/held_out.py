"""The text that a model is evaluated on."""

import warnings
from dataclasses import dataclass

from hope_hf.data import DataConfig, find_files, load_files, validation_texts

from .arguments import Arguments


@dataclass(frozen=True)
class HeldOut:
    """Documents that the model was not trained on."""

    texts: list[str]
    corpora: list[str]
    """The corpus of each document; one name for all where the text is no mixture."""
    source: str
    """Where they come from, for people."""

    def head(self, count: int | None) -> "HeldOut":
        """The first documents; all for None."""
        return HeldOut(self.texts[:count], self.corpora[:count], self.source)


def held_out_documents(args: Arguments) -> HeldOut:
    """All of `--validation_file`, or the documents that `run_clm.py` holds out with the same data flags.

    Of a stream, and with `--max_eval_samples` of every corpus, it is the first ones. Raises ValueError if there is no
    text.
    """
    if args.validation_file:
        if args.streaming:
            warnings.warn("--streaming is ignored: --validation_file is read as a whole.", stacklevel=2)
        files = find_files(args.validation_file, "--validation_file", "validation")
        documents = load_files(files, "--validation_file")
        found, source = {"text": documents["text"][: args.max_eval_samples]}, args.validation_file
    elif args.dataset_name == "synthetic":
        raise ValueError("--dataset_name synthetic is not text: name one with --validation_file.")
    else:
        config = DataConfig(
            dataset_name=args.dataset_name,
            dataset_config_name=args.dataset_config_name,
            train_file=args.train_file,
            dataset_mixture=args.dataset_mixture,
            train_shards=args.train_shards,
            validation_split_percentage=args.validation_split_percentage,
            max_eval_samples=args.max_eval_samples,
            streaming=args.streaming,
            trust_remote_code=args.trust_remote_code,
        )
        found, named = validation_texts(config)
        source = f"{named}, held-out documents"
    rows = [(text, corpus) for corpus, texts in found.items() for text in texts if text and not text.isspace()]
    if not rows:
        raise ValueError(f"{source} holds no text to evaluate on: give another --validation_file.")
    texts, corpora = zip(*rows, strict=True)
    return HeldOut(list(texts), list(corpora), source)
