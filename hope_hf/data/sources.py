"""Every source of training data, opened: its blocks, the loader of batches, and its validation text."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path

from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from hope_hf.cli.process import warn_once

from .config import DataConfig
from .corpora import Documents, check_cache, held_out_documents, open_corpus, require_as_many, warn_of_excess
from .documents import open_sources, training_source
from .encoding import document_start, make_encoder
from .files import find_files
from .loader import BlockLoader, Layout, Shuffle, StreamLoader
from .mixture import BUILTIN, Corpus, read_mixture
from .order import Mixed, Shuffled
from .packing import Block, RandomBlocks, TokenBlocks, TokenStream, stable_seed, tokenize
from .shards import ShardedCorpus, ShardedStream, open_folder
from .vocabulary import DEFAULT_VOCAB_SIZE, check_vocabulary, load_tokenizer, train_tokenizer


@dataclass
class Opened:
    """Training and validation data of all ranks, tokenized or about to be."""

    tokenizer: PreTrainedTokenizerBase
    train: Callable[[Layout, dict | None], BlockLoader | StreamLoader]
    """The loader of one rank, which continues after the state if there is one."""
    train_tokens: int | None
    """Tokens of one epoch; None for a stream."""
    validation: Sequence[Block]
    identity: tuple
    """What defines the tokens and the order, but for block size, boundary and seed."""
    description: str
    """Source and size, for people."""
    is_text: bool = True
    """False for random tokens, which have no bytes and no documents."""


_TOKENIZER_BYTES = 32_000_000


def open_text(config: DataConfig) -> Opened:
    """A data set, files or the built-in corpus; tokenized here, or while training if it is a stream."""
    sources = open_sources(config)
    tokenizer = choose_tokenizer(config, sources.train)
    held = tokenize(sources.validation, tokenizer, config.preprocessing_num_workers)
    if len(held) < 2:
        fix = "give a file with text" if config.validation_file else "pass --validation_file"
        raise ValueError(f"{_source_flag(config)} gave no validation text: {fix}.")
    kind = _streamed if isinstance(sources.train, IterableDataset) else _packed
    train, tokens, identity, extent = kind(config, sources.train, tokenizer)
    return Opened(
        tokenizer=tokenizer,
        train=train,
        train_tokens=tokens,
        validation=TokenBlocks(held, config.block_size, keep_last=True),
        identity=(identity, held.digest()),
        description=f"{sources.description}: {extent}; validation {describe(held)}",
    )


def choose_tokenizer(config: DataConfig, documents: Dataset | IterableDataset | None) -> PreTrainedTokenizerBase:
    """The tokenizer of `--tokenizer_name`, or one trained on the documents; it fits the model's vocabulary."""
    if config.tokenizer_name:
        tokenizer = load_tokenizer(config.tokenizer_name, config.trust_remote_code)
    elif config.dataset_name:
        raise ValueError(
            f"--dataset_name {config.dataset_name} needs a --tokenizer_name: a folder or Hub name, or one made with "
            "python -m hope_hf.data.tokenizer."
        )
    else:
        tokenizer = train_tokenizer(_sample(documents), config.vocab_size or DEFAULT_VOCAB_SIZE)
    if config.vocab_size is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    return tokenizer


def require_a_block(config: DataConfig, tokens: int, text: str = "the training text") -> None:
    """Raise ValueError where the training text fills no block."""
    if tokens < config.block_size:
        raise ValueError(
            f"--block_size {config.block_size} is longer than {text} of {tokens} tokens: lower it or add text."
        )


def describe(stream: TokenStream) -> str:
    """Size of a token stream, for people."""
    return f"{len(stream.starts):,} documents, {len(stream):,} tokens"


def _packed(config: DataConfig, documents: Dataset, tokenizer: PreTrainedTokenizerBase):
    stream = tokenize(documents, tokenizer, config.preprocessing_num_workers)
    require_a_block(config, len(stream))
    blocks, positions = TokenBlocks(stream, config.block_size), config.document_boundary == "reset"
    order = Shuffled(len(blocks), config.seed)

    def train(layout, state):
        return BlockLoader(blocks, order, layout, positions, state)

    return train, len(stream), stream.digest(), describe(stream)


def _streamed(config: DataConfig, documents: IterableDataset, tokenizer: PreTrainedTokenizerBase):
    encode = make_encoder(tokenizer)

    def train(layout, state):
        # Rows that carry their memories on read a text in its order.
        buffer = 1 if layout.carry else config.shuffle_buffer_size
        return StreamLoader(documents, encode, layout, Shuffle(buffer, config.seed), state, training_source(config))

    return train, None, _stream_identity(config), "streamed"


def _sample(documents: Dataset | IterableDataset) -> Iterator[str]:
    """Enough text for a small vocabulary: documents evenly spread over the source (the first ones of a stream)."""
    if isinstance(documents, IterableDataset):
        stride = 1
    else:
        read = documents.data.nbytes
        stride = max(1, -(-read // _TOKENIZER_BYTES))
    budget = _TOKENIZER_BYTES
    for row in islice(documents, 0, None, stride):
        if budget <= 0:
            return
        if row["text"]:
            budget -= len(row["text"])
            yield row["text"][:_TOKENIZER_BYTES]


def _stream_identity(config: DataConfig) -> str:
    """A stream is not read to the end, so its flags identify it, and files by name and size."""
    names = (
        "dataset_name dataset_config_name validation_split_percentage max_train_samples shuffle_buffer_size "
        "tokenizer_name"
    ).split()
    named = {name: value for name, value in asdict(config).items() if name in names}
    files = find_files(config.train_file, "--train_file") if config.train_file else []
    return repr((sorted(named.items(), key=str), [(Path(file).name, Path(file).stat().st_size) for file in files]))


def _source_flag(config: DataConfig) -> str:
    if config.validation_file:
        return f"--validation_file {config.validation_file}"
    return f"--dataset_name {config.dataset_name}" if config.dataset_name else f"--train_file {config.train_file}"


_ROWS = 1 << 20
_VALIDATION_ROWS = 32


def open_synthetic(config: DataConfig) -> Opened:
    """Rows of uniformly random tokens. Every row is one document, so there is no boundary to mark."""
    tokenizer = load_tokenizer(config.tokenizer_name) if config.tokenizer_name else train_tokenizer([], 258)
    vocab_size = config.vocab_size or (len(tokenizer) if config.tokenizer_name else DEFAULT_VOCAB_SIZE)
    check_vocabulary(tokenizer, vocab_size)
    rows = config.max_train_samples or _ROWS
    blocks = RandomBlocks(rows, config.block_size, vocab_size, stable_seed(config.seed, 0))
    held_rows = config.max_eval_samples or _VALIDATION_ROWS
    order = Shuffled(rows, config.seed)
    return Opened(
        tokenizer=tokenizer,
        train=lambda layout, state: BlockLoader(blocks, order, layout, False, state),
        train_tokens=rows * config.block_size,
        validation=RandomBlocks(held_rows, config.block_size, vocab_size, stable_seed(config.seed, 1)),
        identity=("synthetic", rows, vocab_size),
        description=f"synthetic: {rows:,} rows of random tokens below {vocab_size:,}",
        is_text=False,
    )


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


def validation_texts(config: DataConfig) -> tuple[dict[str, list[str]], str]:
    """The held-out documents of each corpus, and where they come from, for people.

    Text that is not of a mixture is one corpus, called `text`. Of shards it is what their tokens say. The first
    `max_eval_samples` documents of each corpus are read. Raises ValueError that names the flag or file.
    """
    if config.train_shards:
        return _of_shards(config.train_shards, "--train_shards", config), config.train_shards
    if config.dataset_mixture:
        return _of_mixture(config), config.dataset_mixture
    sources = open_sources(config)
    return {"text": sources.validation["text"][:]}, sources.description


def _of_mixture(config: DataConfig) -> dict[str, list[str]]:
    found = {}
    for corpus in read_mixture(config.dataset_mixture, "--dataset_mixture"):
        if corpus.shards:
            parts = _of_shards(corpus.shards, f"corpus {corpus.name}: shards", config)
            found[corpus.name] = [text for texts in parts.values() for text in texts]
        else:
            share, count = config.validation_split_percentage, config.max_eval_samples
            found[corpus.name] = held_out_documents(corpus, share, count, config.seed)["text"][:]
    return found


def _of_shards(path: str, flag: str, config: DataConfig) -> dict[str, list[str]]:
    folder = open_folder(path, flag)
    # The shards' own, whatever the tokenizer of the model that reads the text.
    tokenizer = folder.tokenizer(DataConfig(trust_remote_code=config.trust_remote_code))
    return {corpus.name: _decoded(corpus, config.max_eval_samples, tokenizer) for corpus in folder.corpora}


def _decoded(corpus: ShardedCorpus, count: int | None, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    stream = corpus.validation.head(count)
    whole = stream.block(0, len(stream))
    # A document's text lies between the token that begins it and EOS, which may be the one that begins the next.
    end = None if document_start(tokenizer) == tokenizer.eos_token_id else -1
    documents = whole.tokens.tensor_split(whole.starts[1:])
    return [tokenizer.decode(document[1:end], clean_up_tokenization_spaces=False) for document in documents]
