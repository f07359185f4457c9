"""Text files that a conversation reads."""

from hope_hf.common.files import read_small
from hope_hf.common.process import one_line


def text_of(path: str, named: str) -> str:
    """The text of a file; ValueError if it cannot be read, is no text in UTF-8, or is empty."""
    try:
        text = read_small(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{named} {path} cannot be read as text in UTF-8: {reason}.") from None
    if not text.strip():
        raise ValueError(f"{named} {path} is empty: name a file with text.")
    return text
