"""The texts of benchmarks/quality.py: found, split by position, each with one tokenizer for all models.

Each part of a text is ONE document, also in the built-in corpus, whose files are joined with a blank line between
them. At the start of a document inside a row, transformers' recurrent models would keep their state, but HOPE and
attention models would restart. Without such boundaries all models see the same rows of tokens and start each row with
an empty state.
"""

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from hope_hf.common.files import replace_text
from hope_hf.data.documents import corpus_documents, split_documents
from hope_hf.data.vocabulary import save_tokenizer, train_tokenizer

BUILTIN = "builtin"
FILES = {"tinyshakespeare": "tinyshakespeare.txt", "moby_dick": "gutenberg_2701_moby_dick.txt"}
TEXTS = (BUILTIN, *FILES)
HELD_OUT_PERCENT = 10.0
# The built-in corpus is eight times as long as the others: evaluating a tenth would take as long as some trainings.
HELD_OUT_PERCENT_OF_BUILTIN = 5.0


@dataclass(frozen=True)
class Text:
    """A prepared text."""

    train: Path
    validation: Path
    folder: Path
    digest: str
    """Digest of both parts: results on texts with other digests are not compared."""

    def tokenizer(self, vocab_size: int) -> Path:
        """Folder of the byte-level BPE of the training part; trained at the first call."""
        folder = self.folder / f"tokenizer-{vocab_size}"
        if not folder.exists():
            unfinished = folder.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            save_tokenizer(train_tokenizer([self.train.read_text(encoding="utf-8")], vocab_size), unfinished)
            unfinished.rename(folder)
        return folder


def prepare(name: str, data_dir: Path | None, work_dir: Path) -> Text:
    """Write the two parts of a text of TEXTS to `work_dir`, or find them there.

    `data_dir` holds `text/<file>`. Raises ValueError with one sentence if the file is missing.
    """
    train, validation = _builtin() if name == BUILTIN else part(_read(name, data_dir))
    digest = hashlib.sha256(f"{train}\0{validation}".encode()).hexdigest()[:12]
    folder = work_dir / f"{name}-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in (("train.txt", train), ("validation.txt", validation)):
        if not (folder / file).exists():
            replace_text(folder / file, content)
    return Text(folder / "train.txt", folder / "validation.txt", folder, digest)


def part(text: str, percentage: float = HELD_OUT_PERCENT) -> tuple[str, str]:
    """Head and tail of a text, the tail about `percentage` of its characters; split at the start of a line."""
    cut = text.find("\n", round(len(text) * (1 - percentage / 100))) + 1
    return text[:cut], text[cut:]


def book(text: str) -> str:
    """The text between Project Gutenberg's notices; its licence would be a seventh of the held-out tenth."""
    lines = text.splitlines(keepends=True)
    starts = [index for index, line in enumerate(lines) if line.startswith("*** START OF")]
    ends = [index for index, line in enumerate(lines) if line.startswith("*** END OF")]
    return "".join(lines[starts[0] + 1 if starts else 0 : ends[0] if ends else len(lines)])


def _builtin() -> tuple[str, str]:
    documents = corpus_documents()
    # Split by hash of the file's name, as in the demo.
    sides = split_documents((name for name, _ in documents), HELD_OUT_PERCENT_OF_BUILTIN)
    train, validation = ("\n\n".join(documents[index][1] for index in side) for side in sides)
    return train, validation


def _read(name: str, data_dir: Path | None) -> str:
    if data_dir is None:
        raise ValueError(f"The text {name} needs a folder with text/{FILES[name]}: name it with --data_dir.")
    path = data_dir / "text" / FILES[name]
    try:
        # Line ends become \n, and a byte order mark is not text.
        return book(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise ValueError(f"The text {name} cannot be read from {path} ({reason}): check --data_dir.") from None
