"""Four small corpora of different kinds, and a mixture of them."""

import json
from pathlib import Path

from hope_hf.data import save_tokenizer, train_tokenizer

# Characters that `prepare` encodes together, so that there are several shards.
TEXT_TOGETHER = 2_000
WORDS = "and bread came down every fine great house into just know little most never other place".split()


def sentence(corpus: int, number: int) -> str:
    """Text that no other number or corpus has; every word shows the corpus."""
    words = " ".join(WORDS[(number * k + corpus) % 16] + "ABCD"[corpus] for k in range(1, 30))
    return f"Number {number}: {words}."


def write_corpora(folder: Path) -> Path:
    """Text files, rows of two kinds and one long book; returns the mixture file."""
    (folder / "notes").mkdir()
    for number in range(60):
        (folder / "notes" / f"{number}.txt").write_text(sentence(0, number))
    rows = [{"text": sentence(1, number), "title": f"row {number}"} for number in range(80)]
    # A copy, a blank one and a short one.
    rows += [rows[3], {"text": "  ", "title": "blank"}, {"text": "Short.", "title": "short"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pages = [{"page": sentence(2, number), "kind": "p"} for number in range(120)]
    (folder / "pages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pages))
    (folder / "book.txt").write_text("\n\n".join(sentence(3, number) for number in range(100)))
    mixture = folder / "mix.yaml"
    mixture.write_text(f"""\
corpora:
  notes:
    files: {folder}/notes/*.txt
    max_tokens: 3000
    weight: 0.4
  rows:
    files: {folder}/rows.jsonl
    weight: 0.3
    deduplicate: true
    min_length: 20
  pages:
    files: {folder}/pages.jsonl
    text_column: page
    max_documents: 70
    weight: 0.2
  book:
    files: {folder}/book.txt
    weight: 0.1
""")
    save_tokenizer(train_tokenizer([sentence(corpus, 1) for corpus in range(4)], 300), folder / "tokenizer")
    return mixture


def prepare_words(mixture: Path, folder: Path) -> list[str]:
    """The command line that prepares the mixture into a folder, in several shards for each corpus."""
    return [
        *(str(mixture), "--tokenizer_name", str(mixture.parent / "tokenizer"), "--output_dir", str(folder)),
        *("--shard_tokens", "1024", "--validation_split_percentage", "10"),
    ]
