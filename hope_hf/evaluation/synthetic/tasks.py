"""All synthetic tasks."""

from .associative_recall import associative_recall
from .formal_languages import formal_languages
from .mad import mad
from .task import Task


def known_tasks(lengths: list[int] | None = None) -> dict[str, Task]:
    """All tasks by name; `lengths` are the longest words of the formal languages' bins; other tasks ignore them."""
    return {**formal_languages(lengths), **associative_recall(), **mad()}
