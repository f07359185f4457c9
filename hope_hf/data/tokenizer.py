"""Train a tokenizer on files; the same code as the demo's tokenizer.

python -m hope_hf.data.tokenizer --files 'books/*.txt' --vocab_size 32000 --output_dir my_tokenizer
"""

import sys
from dataclasses import MISSING, dataclass

from hope_hf.cli.arguments import flag
from hope_hf.cli.folders import check_output
from hope_hf.cli.parser import Parser
from hope_hf.cli.process import complain, warn_in_sentences, warn_once

from .files import find_files, read_documents
from .vocabulary import DEFAULT_VOCAB_SIZE, LARGEST_VOCABULARY, SMALLEST_VOCABULARY, save_tokenizer, train_tokenizer


@dataclass
class Arguments:
    """All flags."""

    files: list[str] = flag(MISSING, ".txt, .json, .jsonl or .parquet; globs are allowed.")
    output_dir: str = flag(MISSING, "Folder for tokenizer.json and tokenizer_config.json.")
    vocab_size: int = flag(DEFAULT_VOCAB_SIZE, "Entries.", least=SMALLEST_VOCABULARY, most=LARGEST_VOCABULARY)


def make_parser() -> Parser:
    """All flags."""
    return Parser(
        Arguments,
        prog="python -m hope_hf.data.tokenizer",
        description="Train a byte-level BPE on text files.",
        allow_abbrev=False,
    )


def main(argv: list[str]) -> int:
    """Returns 0, or 2 after a mistake of the user."""
    warn_in_sentences()
    try:
        args = make_parser().parse_args(argv)
        check_output(args.output_dir, "--output_dir")
        found = [find_files(pattern, "--files") for pattern in args.files]
        texts = (text for files in found for text in read_documents(files, "--files"))
        tokenizer = train_tokenizer(texts, args.vocab_size)
        save_tokenizer(tokenizer, args.output_dir)
    except ValueError as error:
        return complain(error, 2)
    if len(tokenizer) < args.vocab_size:
        warn_once(f"the text has no more pairs to merge than --vocab_size {len(tokenizer)} holds.")
    print(f"{len(tokenizer):,} entries in {args.output_dir}: use it with --tokenizer_name {args.output_dir}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
