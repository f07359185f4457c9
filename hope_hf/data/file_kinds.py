"""Kinds of files of documents, by the endings of their names."""

import os

KINDS = {
    ".txt": "text", ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".arrow": "arrow",
}  # fmt: skip
# pyarrow has these codecs itself, so no other package is needed.
CODECS = {".gz": "gzip", ".bz2": "bz2", ".lz4": "lz4", ".zst": "zstd"}
# Archives may hold several files; pyarrow does not unpack .xz.
ARCHIVES = (".xz", ".zip", ".7z", ".tar", ".tgz")


def unpacked_ending(path: str) -> str:
    """The ending of a file's name, in lower case and without that of its compression, such as `.jsonl`."""
    stem, ending = os.path.splitext(path)
    if ending.lower() in CODECS:
        ending = os.path.splitext(stem)[1]
    return ending.lower()


def kind_of(path: str) -> str | None:
    """The kind of a file by its name: a value of `KINDS`, or None."""
    return KINDS.get(unpacked_ending(path))
