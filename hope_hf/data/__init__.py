"""From text to batches: sources, tokenizer, packing, and loaders that resume exactly.

    data = build_data(DataConfig(train_file="books/*.txt", block_size=512), rank=0, world_size=1, state=None)
    for batch, state in data.train:      # endless; see `hope_hf.data.packing` for the batch, `.loader` for the state
        ...
    for batch in data.validation:        # finite, the same on every rank and in every pass
        ...

`data` (class `Data`) has tokenizer, train, validation, block_size, fingerprint, description and
validation_bytes_per_token. Every mistake of the user raises ValueError with one sentence that names the flag or file.
"""

from hope_hf.lazy import late_names

# By module, what the other rooms take from there.
NAMES = {
    "build": ("Data", "build_data"),
    "cache": ("cache_for", "plain_name"),
    "chat_template": ("Chat", "ChatTemplate", "set_chat_template"),
    "chats": ("filled_chats",),
    "config": ("DataConfig", "require_texts"),
    "corpora": ("Needed", "passing"),
    "documents": ("corpus_documents", "open_sources"),
    "encoding": ("document_start", "plain_ids", "tokens_before"),
    "file_names": ("find_files", "named_files", "size_of_files"),
    "files": ("load_files",),
    "mixture": ("Corpus", "read_mixture"),
    "sources": ("validation_texts",),
    "text_facts": ("change_of_files", "difference_of_text"),
    "sizes": ("DEFAULT_VOCAB_SIZE",),
    "vocabulary": (
        "bytes_per_id", "check_vocabulary", "load_tokenizer", "save_tokenizer", "train_tokenizer",
        "warn_of_other_tokenizer",
    ),
}  # fmt: skip
__getattr__, __dir__ = late_names(__name__, NAMES)
