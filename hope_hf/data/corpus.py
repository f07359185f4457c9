"""The built-in corpus: text that every Python installation carries, so that the demo needs no download."""

import ast
import sysconfig
from pathlib import Path

# Left out: test packages (mostly data and expected outputs), installed packages (site-packages), modules that some
# distributions of Python split off or later versions dropped (the corpus should be nearly the same everywhere), tables
# of characters, and files generated for one machine.
_LEFT_OUT = frozenset(
    "test tests idle_test site-packages dist-packages lib-dynload __pycache__ __phello__ "
    "idlelib tkinter turtledemo ensurepip distutils lib2to3 encodings pydoc_data".split()
)
_GENERATED = ("config-", "_sysconfigdata")


def corpus_documents() -> list[tuple[str, str]]:
    """(name, text) of every document, about 8 MB in 460 of them, ordered by name.

    A document is a source file of the standard library, named by its path there (`asyncio/events.py`), or a chapter of
    the language reference behind `help()` (`pydoc_data/topics/while`). Nothing is imported or executed.
    Raises ValueError where this Python carries no sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents = {}
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if not any(part in _LEFT_OUT or part.startswith(_GENERATED) for part in relative.parts):
            documents[relative.as_posix()] = path.read_bytes().decode("utf-8", errors="replace")
    topics = root / "pydoc_data" / "topics.py"
    if not documents or not topics.is_file():
        raise ValueError(f"This Python has no standard library sources in {root}: name a text with --train_file.")
    for name, text in _read_topics(topics).items():
        documents[f"pydoc_data/topics/{name}"] = text
    return [(name, documents[name]) for name in sorted(documents) if documents[name].strip()]


def _read_topics(path: Path) -> dict[str, str]:
    module = ast.parse(path.read_text(encoding="utf-8"))
    (table,) = (node.value for node in module.body if isinstance(node, ast.Assign))
    return ast.literal_eval(table)
