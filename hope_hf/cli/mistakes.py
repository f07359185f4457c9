"""Exceptions that libraries raise for the user's files and values, and their message in one line."""

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

# transformers fails on broken files with most of Python's own errors. A RecursionError is a RuntimeError.
MISTAKES = (
    OSError, ValueError, TypeError, ArithmeticError, ImportError, AttributeError, LookupError, RuntimeError,
    StrictDataclassError, SafetensorError,
)  # fmt: skip


def one_line(error: BaseException) -> str:
    """An error's message without its line breaks."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    # A strict config wraps the message of its check in an error that names the check.
    reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
    return " ".join(str(reason).split()) or type(error).__name__
