"""The data of a training loop from a `DataConfig`: the opened source, its batches and its measures."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hope_hf.common.results import IGNORED

from .config import DataConfig
from .loader import Layout, Prefetched
from .packing import Block, Indexed, collate
from .sources import OpenSource, open_source
from .text_facts import text_facts
from .vocabulary import bytes_per_id, highest_id


class ValidationBatches(Indexed):
    """Every token of the validation documents once, in order; all ranks see the same batches.

    The last batch may have fewer rows, and its last row is padded (labels -100). Batches are made when they are read.
    """

    def __init__(self, blocks: Sequence[Block], layout: Layout, padding: int, positions: bool):
        super().__init__(-(-len(blocks) // layout.batch_size))
        self.blocks = blocks
        self.block_size = layout.block_size
        self.batch_size = layout.batch_size
        self.padding = padding
        self.positions = positions

    def _make(self, index: int) -> dict[str, Tensor]:
        first = index * self.batch_size
        last = min(first + self.batch_size, len(self.blocks))
        rows = [self.blocks[row] for row in range(first, last)]
        return collate(rows, self.block_size, self.padding, self.positions)


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
    unigram_loss: float | None
    """Nats per scored validation token of a model that knows only how frequent the tokens of the training text are
    (docs/reference.md); None where these are not counted."""
    train_tokens: int | None
    """Tokens of one epoch; None for a stream."""
    fingerprint: str
    """A hash of what defines the tokens and their order; the batch size and the number of ranks are not in it."""
    facts: dict
    """See `text_facts`; empty for synthetic tokens."""
    description: str
    """Source and size, for people."""


def build_data(config: DataConfig, *, rank: int = 0, world_size: int = 1, state: dict | None = None) -> Data:
    """Read, tokenize and pack what `config` names, for one of `world_size` ranks.

    `state`: one that `Data.train` yielded on this rank; the training data continue exactly after its batch. Raises
    ValueError with one sentence that names the flag or file.
    """
    opened = open_source(config)
    carry = config.document_boundary == "carry"
    layout = Layout(config.block_size, config.per_device_train_batch_size, rank, world_size, carry)
    positions = opened.is_text and not carry
    validation = ValidationBatches(opened.validation, layout, opened.tokenizer.eos_token_id, positions)
    scored = _scored(validation, highest_id(opened.tokenizer) + 1) if opened.is_text else None
    return Data(
        tokenizer=opened.tokenizer,
        train=Prefetched(
            opened.train(layout, state=state), config.dataloader_num_workers, config.dataloader_pin_memory
        ),
        validation=validation,
        block_size=config.block_size,
        validation_bytes_per_token=_bytes_per_token(scored, opened.tokenizer) if opened.is_text else 1.0,
        unigram_loss=None if opened.count is None else unigram_loss(opened.count(len(scored)), scored),
        train_tokens=opened.train_tokens,
        fingerprint=_fingerprint(config, opened),
        facts=text_facts(config, opened.tokenizer) if opened.is_text else {},
        description=opened.description,
    )


def _fingerprint(config: DataConfig, source: OpenSource) -> str:
    identity = (
        *source.identity,
        len(source.tokenizer),
        config.block_size,
        config.document_boundary,
        config.seed,
    )
    return hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def _scored(validation: ValidationBatches, size: int) -> Tensor:
    """How often each of `size` tokens is scored in the validation text, int64 [size]."""
    counts = torch.zeros(size, dtype=torch.int64)
    for batch in validation:
        # A row's first token is not predicted.
        labels = batch["labels"][:, 1:]
        counts += torch.bincount(labels[labels != IGNORED], minlength=size)
    return counts


def _bytes_per_token(scored: Tensor, tokenizer: PreTrainedTokenizerBase) -> float:
    table = torch.tensor(bytes_per_id(tokenizer), dtype=torch.int64)
    text_bytes = int((table * scored[: len(table)]).sum())
    return text_bytes / int(scored.sum())


def unigram_loss(train: Tensor, scored: Tensor) -> float:
    """Mean -ln((count + 1) / (tokens + entries)) over the scored tokens; both arguments are counts, int64 [entries].

    One is added to every count, so that a token which the training text lacks has a probability.
    """
    smoothed = train.double() + 1
    nats = smoothed.sum().log() - smoothed.log()
    return float((scored * nats).sum() / scored.sum())
