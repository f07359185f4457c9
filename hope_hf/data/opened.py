"""What every source of training data ends as, whatever it began as: blocks, and batches of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from .loader import BlockLoader, Layout, StreamLoader
from .packing import Block


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
