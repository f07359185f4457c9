"""Seeded random tokens as data, for measuring speed."""

from .config import DataConfig
from .loader import BlockLoader
from .opened import Opened
from .order import Shuffled
from .packing import RandomBlocks, stable_seed
from .vocabulary import DEFAULT_VOCAB_SIZE, check_vocabulary, load_tokenizer, train_tokenizer

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
