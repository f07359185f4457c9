"""Several corpora as data: a stream of tokens of each, and blocks of them in shares."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from datasets import concatenate_datasets
from transformers import PreTrainedTokenizerBase

from hope_hf.cli.process import warn_once

from .config import DataConfig
from .corpora import Documents, check_cache, open_corpus, require_as_many, warn_of_excess
from .loader import BlockLoader
from .mixture import BUILTIN, Corpus, read_mixture
from .opened import Opened
from .order import Mixed
from .packing import Block, TokenBlocks, TokenStream, tokenize
from .shards import ShardedStream, open_folder
from .text import choose_tokenizer, require_a_block


@dataclass
class Part:
    """The tokens of one corpus."""

    name: str
    train: TokenStream | ShardedStream
    validation: TokenStream | ShardedStream
    weight: float | None


class JoinedBlocks(Sequence):
    """The blocks of several sequences, one sequence after another."""

    def __init__(self, sequences: Sequence[Sequence[Block]]):
        self._sequences = sequences
        self._ends = list(accumulate(map(len, sequences)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Block:
        if not 0 <= index < len(self):
            raise IndexError(index)
        which = bisect.bisect_right(self._ends, index)
        return self._sequences[which][index - self._ends[which] + len(self._sequences[which])]


def open_mixture(config: DataConfig) -> Opened:
    """The corpora of `--dataset_mixture`, tokenized here unless they are shards."""
    corpora = read_mixture(config.dataset_mixture, "--dataset_mixture")
    _require_tokenizer(config, corpora)
    tokenizer = choose_tokenizer(config, None) if config.tokenizer_name else None
    check_cache(corpora, config.validation_split_percentage, config.seed, tokenizer)
    share, count = config.validation_split_percentage, config.max_eval_samples
    documents = {
        corpus.name: open_corpus(corpus, share, count, config.seed, tokenizer)
        for corpus in corpora
        if not corpus.shards
    }
    if tokenizer is None:
        texts = concatenate_datasets([part.train for part in documents.values()])
        tokenizer = choose_tokenizer(config, texts)
    parts = [
        _tokenized(documents[corpus.name], tokenizer, config.preprocessing_num_workers)
        if corpus.name in documents
        else _sharded(corpus, tokenizer, config)
        for corpus in corpora
    ]
    return _mix(config, tokenizer, parts, config.dataset_mixture)


def open_shards(config: DataConfig) -> Opened:
    """The corpora of a folder of shards, with the weights that they were prepared with."""
    folder = open_folder(config.train_shards, "--train_shards")
    tokenizer = folder.tokenizer(config)
    parts = [
        Part(corpus.name, corpus.train, corpus.validation.head(config.max_eval_samples), corpus.weight)
        for corpus in folder.corpora
    ]
    return _mix(config, tokenizer, parts, config.train_shards)


def _mix(config: DataConfig, tokenizer: PreTrainedTokenizerBase, parts: list[Part], source: str) -> Opened:
    carry = config.document_boundary == "carry"
    if carry and len(parts) > 1:
        raise ValueError(
            f"--document_boundary carry reads one text from its beginning to its end, and {source} mixes "
            f"{len(parts)}: use --document_boundary reset."
        )
    trains = [TokenBlocks(part.train, config.block_size) for part in parts]
    for part, blocks in zip(parts, trains, strict=True):
        if not len(blocks):
            require_a_block(config, len(part.train), f"the corpus {part.name}")
    weights = [part.weight for part in parts]
    order = Mixed(list(map(len, trains)), None if None in weights else weights, config.seed)
    held = [TokenBlocks(part.validation, config.block_size, keep_last=True) for part in parts if len(part.validation)]
    if not held:
        raise ValueError(f"{source} gave no validation text: raise --validation_split_percentage.")
    blocks = JoinedBlocks(trains)
    tokens = len(blocks) * config.block_size
    _warn_of_repeats(parts, trains, order)
    shares = ", ".join(
        f"{part.name} {share / len(order):.1%}" for part, share in zip(parts, order.shares, strict=True)
    )
    held_tokens = sum(len(part.validation) for part in parts)
    return Opened(
        tokenizer=tokenizer,
        train=lambda layout, state: BlockLoader(blocks, order, layout, not carry, state),
        train_tokens=tokens,
        validation=JoinedBlocks(held),
        identity=tuple((part.train.digest(), part.validation.digest(), part.weight) for part in parts),
        description=f"{source}: {tokens:,} tokens ({shares}); validation {held_tokens:,} tokens",
    )


def _warn_of_repeats(parts: list[Part], trains: list[TokenBlocks], order: Mixed) -> None:
    """Name the corpora that an epoch reads more than once."""
    times = {
        part.name: share / len(blocks)
        for part, blocks, share in zip(parts, trains, order.shares, strict=True)
        # A share rounded up to whole blocks is not meant.
        if share > 1.1 * len(blocks)
    }
    if times:
        listed = ", ".join(f"{name} {count:.1f} times" for name, count in times.items())
        warn_once(f"An epoch of {len(order)} blocks reads {listed}: memories learn less from text that they know.")


def _require_tokenizer(config: DataConfig, corpora: list[Corpus]) -> None:
    of_the_hub = any(corpus.dataset_name not in (None, BUILTIN) for corpus in corpora)
    if not config.tokenizer_name and (of_the_hub or all(corpus.shards for corpus in corpora)):
        raise ValueError(
            f"--dataset_mixture {config.dataset_mixture} needs a --tokenizer_name: a folder or Hub name, or one made "
            "with python -m hope_hf.data.tokenizer."
        )


def _tokenized(documents: Documents, tokenizer: PreTrainedTokenizerBase, workers: int | None) -> Part:
    corpus = documents.corpus
    train = tokenize(documents.train, tokenizer, workers)
    if corpus.max_tokens is not None:
        require_as_many(corpus, "max_tokens", len(train))
        # The document that makes the limit is read whole.
        train = train.head(int((train.starts < corpus.max_tokens).sum()))
        warn_of_excess(corpus, len(train))
    return Part(corpus.name, train, tokenize(documents.validation, tokenizer, workers), corpus.weight)


def _sharded(corpus: Corpus, tokenizer: PreTrainedTokenizerBase, config: DataConfig) -> Part:
    folder = open_folder(corpus.shards, f"corpus {corpus.name}: shards")
    folder.check_tokenizer(tokenizer)
    trains = [part.train for part in folder.corpora]
    validations = [part.validation.head(config.max_eval_samples) for part in folder.corpora]
    return Part(corpus.name, ShardedStream.join(trains), ShardedStream.join(validations), corpus.weight)
