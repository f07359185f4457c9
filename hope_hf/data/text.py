"""Text of one source as data: documents, their tokens, blocks of them in an order."""

from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from .config import DataConfig
from .encoding import make_encoder
from .files import find_files
from .loader import BlockLoader, Shuffle, StreamLoader
from .opened import Opened
from .order import Shuffled
from .packing import TokenBlocks, TokenStream, tokenize
from .sources import open_sources, training_source
from .vocabulary import DEFAULT_VOCAB_SIZE, check_vocabulary, load_tokenizer, train_tokenizer

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
