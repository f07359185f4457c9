"""Train a tokenizer on files, a data set or a mixture; the same code as the demo's tokenizer.

hope-hf tokenizer --files 'books/*.txt' --vocab_size 32000 --output_dir my_tokenizer
"""

import json
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from hope_hf.common.flags import COUNT, LARGEST_VOCABULARY, check_output, files_flag, flag
from hope_hf.common.parser import Parser
from hope_hf.common.process import warn_once
from hope_hf.common.program import importing, program

from .file_names import named_files
from .mixture import read_mixture
from .sizes import DEFAULT_VOCAB_SIZE, SMALLEST_VOCABULARY

REPORT = "tokenizer_report.json"
_SOURCES = ("files", "dataset_name", "dataset_mixture")


@dataclass
class Arguments:
    """All flags."""

    output_dir: str = flag(MISSING, f"Folder for tokenizer.json, tokenizer_config.json and {REPORT}.")
    files: list | str | None = files_flag("Text in the formats of run_clm.py --train_file; names and quoted patterns.")
    text_column: str | None = flag(None, "Column of the text (default: text, or the only one of strings).")
    on_bad_rows: Literal["error", "skip"] = flag(
        "error", "Rows of a file that cannot be parsed or hold no text. skip: count them and go on."
    )
    dataset_name: str | None = flag(None, "Hub name or folder of a data set; its training split is read.")
    dataset_config_name: str | None = flag(None, "Configuration of that data set.")
    dataset_mixture: str | None = flag(None, "YAML file that mixes several corpora, see docs/data.md.")
    max_bytes: int = flag(1_000_000_000, "Bytes of text to learn from; a longer text is sampled by weight.", **COUNT)
    vocab_size: int = flag(DEFAULT_VOCAB_SIZE, "Entries.", least=SMALLEST_VOCABULARY, most=LARGEST_VOCABULARY)


def make_parser() -> Parser:
    """All flags."""
    return Parser(
        (Arguments,),
        prog="hope-hf tokenizer",
        usage="%(prog)s --files NAME ... --output_dir DIR [flags]",
        description="Train a byte-level BPE on text.",
        example="hope-hf tokenizer --files 'books/*.txt' --vocab_size 32000 --output_dir my_tokenizer",
        link="docs/data.md",
        allow_abbrev=False,
    )


@program
def main(argv: list[str]) -> int:
    """Returns 0, or 2 after a mistake of the user."""
    args = make_parser().parse_args(argv)
    check_output(args.output_dir, "--output_dir")
    _check(args)
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        from .tokenizer_text import read_texts, report_on, sample, warn_of_neglect
        from .vocabulary import save_tokenizer, train_tokenizer

    texts = read_texts(args)
    if not any(text.size for text in texts):
        (name,) = _named_sources(args)
        raise ValueError(f"--{name} {getattr(args, name)} holds no text: give a file with text.")
    tokenizer = train_tokenizer(sample(texts, args.max_bytes), args.vocab_size)
    save_tokenizer(tokenizer, args.output_dir)
    report = report_on(tokenizer, texts)
    (Path(args.output_dir) / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if len(tokenizer) < args.vocab_size:
        warn_once(f"the text has pairs to merge for {len(tokenizer):,} entries of --vocab_size {args.vocab_size:,}.")
    warn_of_neglect({name: corpus["bytes_per_token"] for name, corpus in report["corpora"].items()})
    print(
        f"{len(tokenizer):,} entries in {args.output_dir}, {report['bytes_per_token']:.2f} bytes per token: use it "
        f"with --tokenizer_name {args.output_dir}"
    )
    return 0


def _named_sources(args: Arguments) -> list[str]:
    return [name for name in _SOURCES if getattr(args, name)]


def _check(args: Arguments) -> None:
    """ValueError for mistakes that the flags alone show, and for files that do not exist."""
    if len(_named_sources(args)) != 1:
        raise ValueError("Give exactly one of --files, --dataset_name and --dataset_mixture for the text.")
    if args.dataset_config_name and not args.dataset_name:
        raise ValueError("--dataset_config_name needs a --dataset_name: add it.")
    if args.files:
        named_files(args.files, "--files")
    if args.dataset_mixture:
        read_mixture(args.dataset_mixture, "--dataset_mixture")
