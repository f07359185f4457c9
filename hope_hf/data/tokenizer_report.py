"""What a tokenizer makes of the text that it learned from, corpus by corpus."""

from transformers import PreTrainedTokenizerBase

from .tokenizer_sample import Text, drawn

# Read of each corpus.
_BYTES = 1_000_000


def report_on(tokenizer: PreTrainedTokenizerBase, texts: list[Text]) -> dict:
    """JSON-able: bytes per token, unknown tokens and exact round trips, of 1 MB of each corpus; special tokens."""
    corpora = {text.name: _measure(tokenizer, [*drawn(text.documents, text.size, _BYTES)]) for text in texts}
    total_bytes = sum(corpus["bytes"] for corpus in corpora.values())
    total_tokens = sum(corpus["tokens"] for corpus in corpora.values())
    return {
        "vocab_size": len(tokenizer),
        "bytes_per_token": total_bytes / total_tokens,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "corpora": corpora,
    }


def _measure(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> dict:
    ids = [tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"] for text in texts]
    size, tokens = sum(len(text.encode()) for text in texts), sum(map(len, ids))
    return {
        "bytes": size,
        "tokens": tokens,
        "bytes_per_token": size / max(1, tokens),
        "unknown_tokens": sum(row.count(tokenizer.unk_token_id) for row in ids) if tokenizer.unk_token else 0,
        "exact_round_trips": sum(tokenizer.decode(row) == text for row, text in zip(ids, texts, strict=True)),
        "documents": len(texts),
    }
