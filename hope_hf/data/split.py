"""Splits documents into training and validation, in the same way on every machine."""

from collections.abc import Iterable
from hashlib import blake2b


def held_out(key: str, percentage: float) -> bool:
    """Whether the document with this key (its text, or its name) belongs to validation."""
    return _share(key) < percentage / 100


def split_documents(keys: Iterable[str], percentage: float) -> tuple[list[int], list[int]]:
    """Indices of (training, validation) documents; neither is empty where there are two different keys.

    The split is by hash of the key, not by position. So copies of a document are on the same side, and adding or
    removing documents moves no other one. Blank keys belong to neither side.
    """
    shares = {index: _share(key) for index, key in enumerate(keys) if key and not key.isspace()}
    if not shares:
        return [], []
    lowest, highest = min(shares.values()), max(shares.values())
    # Of a few documents, none or all may be below the percentage: the lowest is always held out, the highest never is.
    train, validation = [], []
    for index, share in shares.items():
        held = share != highest and (share < percentage / 100 or share == lowest)
        (validation if held else train).append(index)
    return train, validation


def _share(key: str) -> float:
    digest = blake2b(key.encode("utf-8", errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
