"""What libraries raise for files and values of the user, and how to say it in one line."""

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

# Broken files make transformers stumble where it stands, so most of Python's own errors are among them. A
# RecursionError is a RuntimeError.
MISTAKES = (
    OSError, ValueError, TypeError, ArithmeticError, ImportError, AttributeError, LookupError, RuntimeError,
    StrictDataclassError, SafetensorError,
)  # fmt: skip


def one_line(error: BaseException) -> str:
    """What an error says, without its line breaks."""
    if isinstance(error, RecursionError):
        return "it is nested too deep"
    if isinstance(error, KeyError):
        return f"{error} is missing"
    # A strict config wraps what its check said in the name of the check.
    reason = error.__cause__ if isinstance(error, StrictDataclassError) and error.__cause__ else error
    return " ".join(str(reason).split()) or type(error).__name__
