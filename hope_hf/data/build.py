"""Builds the data of a training loop from a `DataConfig`."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from .config import DataConfig
from .files import find_files
from .loader import BlockLoader, Layout, Prefetched, StreamLoader
from .packing import IGNORED, Block, RandomBlocks, TokenBlocks, collate, make_encoder, stable_seed, tokenize
from .sources import open_sources, training_source
from .vocabulary import DEFAULT_VOCAB_SIZE, bytes_per_id, check_vocabulary, load_tokenizer, train_tokenizer

_TOKENIZER_BYTES = 32_000_000
_SYNTHETIC_ROWS = 1 << 20
_SYNTHETIC_VALIDATION_ROWS = 32


class ValidationBatches(Sequence):
    """Every token of the validation documents once, in order; all ranks see the same batches.

    The last batch may have fewer rows, and its last row is padded (labels -100). Batches are made when they are read.
    """

    def __init__(self, blocks: Sequence[Block], layout: Layout, padding: int, positions: bool):
        self.blocks, self.block_size, self.batch_size = blocks, layout.block_size, layout.batch_size
        self.padding, self.positions = padding, positions

    def __len__(self) -> int:
        return -(-len(self.blocks) // self.batch_size)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        rows = range(index * self.batch_size, min((index + 1) * self.batch_size, len(self.blocks)))
        return collate([self.blocks[row] for row in rows], self.block_size, self.padding, self.positions)


@dataclass
class Data:
    """The data of one rank."""

    tokenizer: PreTrainedTokenizerBase
    train: Prefetched
    """Iterable of (batch, state), endless; `train.batches_per_epoch` is None for a stream."""
    validation: ValidationBatches
    block_size: int
    validation_bytes_per_token: float
    """Bytes of text per scored validation token: loss / ln 2 / this = bits per byte. The EOS that ends a document is
    scored and has no bytes, so the bits include those of the document ends. 1 for synthetic tokens."""
    train_tokens: int | None
    """Tokens of one epoch; None for a stream."""
    fingerprint: str
    """A hash of what defines the tokens and their order; the batch size and the number of ranks are not in it."""
    description: str
    """Source and size, for people."""


def build_data(config: DataConfig, *, rank: int = 0, world_size: int = 1, state: dict | None = None) -> Data:
    """Read, tokenize and pack what `config` names, for one of `world_size` ranks.

    `state`: one that `Data.train` yielded on this rank; the training data continue exactly after its batch. Raises
    ValueError with one sentence that names the flag or file.
    """
    if config.dataset_name == "synthetic":
        return _synthetic(config, rank, world_size, state)
    sources = open_sources(config)
    tokenizer = _tokenizer(config, sources.train)
    if config.vocab_size is not None:
        check_vocabulary(tokenizer, config.vocab_size)
    held = tokenize(sources.validation, tokenizer, config.preprocessing_num_workers)
    if len(held) < 2:
        fix = "give a file with text" if config.validation_file else "pass --validation_file"
        raise ValueError(f"{_source_flag(config)} gave no validation text: {fix}.")
    layout, positions = _layout(config, rank, world_size), config.document_boundary == "reset"
    if isinstance(sources.train, IterableDataset):
        loader = StreamLoader(sources.train, make_encoder(tokenizer), layout, state, training_source(config))
        tokens, identity, extent = None, _stream_identity(config), "streamed"
    else:
        stream = tokenize(sources.train, tokenizer, config.preprocessing_num_workers)
        if len(stream) < config.block_size:
            raise ValueError(
                f"--block_size {config.block_size} is longer than the training text of {len(stream)} tokens: lower it "
                "or add text."
            )
        loader = BlockLoader(TokenBlocks(stream, config.block_size), layout, positions, config.seed, state)
        tokens, identity = len(stream), stream.digest()
        extent = f"{len(stream.starts):,} documents, {tokens:,} tokens"
    blocks = TokenBlocks(held, config.block_size, keep_last=True)
    validation = ValidationBatches(blocks, layout, tokenizer.eos_token_id, positions)
    held_extent = f"{len(held.starts):,} documents, {len(held):,} tokens"
    return Data(
        tokenizer=tokenizer,
        train=Prefetched(loader, config.dataloader_num_workers, config.dataloader_pin_memory),
        validation=validation,
        block_size=config.block_size,
        validation_bytes_per_token=_bytes_per_token(validation, tokenizer),
        train_tokens=tokens,
        fingerprint=_hash(
            identity, held.digest(), len(tokenizer), config.block_size, config.document_boundary, config.seed
        ),
        description=f"{sources.description}: {extent}; validation {held_extent}",
    )


def _tokenizer(config: DataConfig, train: Dataset | IterableDataset) -> PreTrainedTokenizerBase:
    if config.tokenizer_name:
        return load_tokenizer(config.tokenizer_name, config.trust_remote_code)
    if config.dataset_name:
        raise ValueError(
            f"--dataset_name {config.dataset_name} needs a --tokenizer_name: a folder or Hub name, or one made with "
            "python -m hope_hf.data.tokenizer."
        )
    return train_tokenizer(_sample(train), config.vocab_size or DEFAULT_VOCAB_SIZE)


def _sample(documents: Dataset | IterableDataset):
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
            yield row["text"]


def _bytes_per_token(validation: ValidationBatches, tokenizer: PreTrainedTokenizerBase) -> float:
    table = torch.tensor(bytes_per_id(tokenizer), dtype=torch.int64)
    total = count = 0
    for batch in validation:
        # A row's first token has nothing before it to be predicted from.
        labels = batch["labels"][:, 1:]
        scored = labels[labels != IGNORED]
        total, count = total + int(table[scored].sum()), count + scored.numel()
    return total / count


def _synthetic(config: DataConfig, rank: int, world_size: int, state: dict | None) -> Data:
    tokenizer = load_tokenizer(config.tokenizer_name) if config.tokenizer_name else train_tokenizer([], 258)
    vocab_size = config.vocab_size or (len(tokenizer) if config.tokenizer_name else DEFAULT_VOCAB_SIZE)
    check_vocabulary(tokenizer, vocab_size)
    layout, block_size = _layout(config, rank, world_size), config.block_size
    rows = config.max_train_samples or _SYNTHETIC_ROWS
    held_rows = config.max_eval_samples or _SYNTHETIC_VALIDATION_ROWS
    blocks = RandomBlocks(rows, block_size, vocab_size, stable_seed(config.seed, 0))
    held = RandomBlocks(held_rows, block_size, vocab_size, stable_seed(config.seed, 1))
    # Every row is one document, so there is no boundary to mark.
    loader = BlockLoader(blocks, layout, positions=False, seed=config.seed, state=state)
    return Data(
        tokenizer=tokenizer,
        train=Prefetched(loader, config.dataloader_num_workers, config.dataloader_pin_memory),
        validation=ValidationBatches(held, layout, tokenizer.eos_token_id, positions=False),
        block_size=block_size,
        validation_bytes_per_token=1.0,
        train_tokens=rows * block_size,
        fingerprint=_hash("synthetic", rows, vocab_size, block_size, config.document_boundary, config.seed),
        description=f"synthetic: {rows:,} rows of random tokens below {vocab_size:,}",
    )


def _layout(config: DataConfig, rank: int, world_size: int) -> Layout:
    carry = config.document_boundary == "carry"
    return Layout(config.block_size, config.per_device_train_batch_size, rank, world_size, carry)


def _stream_identity(config: DataConfig) -> str:
    """A stream is not read to the end, so its flags identify it, and files by name and size."""
    names = "dataset_name dataset_config_name validation_split_percentage max_train_samples tokenizer_name".split()
    named = {name: value for name, value in asdict(config).items() if name in names}
    files = find_files(config.train_file, "--train_file") if config.train_file else []
    return repr((sorted(named.items(), key=str), [(Path(file).name, Path(file).stat().st_size) for file in files]))


def _source_flag(config: DataConfig) -> str:
    if config.validation_file:
        return f"--validation_file {config.validation_file}"
    return f"--dataset_name {config.dataset_name}" if config.dataset_name else f"--train_file {config.train_file}"


def _hash(*parts) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
