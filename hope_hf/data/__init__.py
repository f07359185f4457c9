"""From text to batches: sources, tokenizer, packing, and loaders that resume exactly.

    data = build_data(DataConfig(train_file="books/*.txt", block_size=512), rank=0, world_size=1, state=None)
    for batch, state in data.train:      # endless; see `hope_hf.data.packing` for the batch, `.loader` for the state
        ...
    for batch in data.validation:        # finite, the same on every rank and in every pass
        ...

`data` (class `Data`) has tokenizer, train, validation, block_size, fingerprint, description and
validation_bytes_per_token. Every mistake of the user raises ValueError with one sentence that names the flag or file.
"""

from datasets import disable_progress_bars

from .build import Data, build_data
from .cache import cache_for, plain_name
from .chat_template import Chat, ChatTemplate, set_chat_template
from .chats import filled_chats
from .config import DataConfig
from .corpora import Needed, passing
from .documents import corpus_documents, open_sources
from .encoding import document_start, plain_ids, tokens_before
from .file_names import find_files, size_of_files
from .files import load_files
from .mixture import Corpus, read_mixture
from .sources import validation_texts
from .text_facts import difference_of_text
from .vocabulary import (
    DEFAULT_VOCAB_SIZE,
    bytes_per_id,
    check_vocabulary,
    load_tokenizer,
    save_tokenizer,
    train_tokenizer,
    warn_of_other_tokenizer,
)

__all__ = [
    "DEFAULT_VOCAB_SIZE",
    "Chat",
    "ChatTemplate",
    "Corpus",
    "Data",
    "DataConfig",
    "Needed",
    "build_data",
    "bytes_per_id",
    "cache_for",
    "check_vocabulary",
    "corpus_documents",
    "difference_of_text",
    "disable_progress_bars",
    "document_start",
    "filled_chats",
    "find_files",
    "load_files",
    "load_tokenizer",
    "open_sources",
    "passing",
    "plain_ids",
    "plain_name",
    "read_mixture",
    "save_tokenizer",
    "set_chat_template",
    "size_of_files",
    "tokens_before",
    "train_tokenizer",
    "validation_texts",
    "warn_of_other_tokenizer",
]
