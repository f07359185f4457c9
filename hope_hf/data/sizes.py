"""Entries of tokenizers that are made from a text."""

DEFAULT_VOCAB_SIZE = 4096
SMALLEST_VOCABULARY = 256 + 2
"""Every byte, the end of a text and padding."""
