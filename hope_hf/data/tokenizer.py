"""Train a tokenizer on files; the same code as the demo's tokenizer.

python -m hope_hf.data.tokenizer --files 'books/*.txt' --vocab_size 32000 --output_dir my_tokenizer
"""

import argparse
import sys

from .files import find_files, read_documents
from .vocabulary import DEFAULT_VOCAB_SIZE, save_tokenizer, train_tokenizer


def main(arguments: list[str] | None = None) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hope_hf.data.tokenizer",
        description="Train a byte-level BPE on text files.",
        allow_abbrev=False,
    )
    parser.add_argument("--files", nargs="+", required=True, help=".txt, .json, .jsonl or .parquet; globs are allowed")
    parser.add_argument("--vocab_size", type=int, default=DEFAULT_VOCAB_SIZE, help="entries (default: %(default)s)")
    parser.add_argument("--output_dir", required=True, help="folder for tokenizer.json and tokenizer_config.json")
    options = parser.parse_args(arguments)
    try:
        found = [find_files(pattern, "--files") for pattern in options.files]
        texts = (text for files in found for text in read_documents(files, "--files"))
        tokenizer = train_tokenizer(texts, options.vocab_size)
        save_tokenizer(tokenizer, options.output_dir)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if len(tokenizer) < options.vocab_size:
        print(
            f"warning: the text has no more pairs to merge than --vocab_size {len(tokenizer)} holds.", file=sys.stderr
        )
    print(f"{len(tokenizer):,} entries in {options.output_dir}: use it with --tokenizer_name {options.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
