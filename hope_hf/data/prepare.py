"""Tokenize a mixture of corpora once, into shards that a training reads piece by piece.

    python -m hope_hf.data.prepare mix.yaml --tokenizer_name my_tokenizer --output_dir shards
    accelerate launch --config_file accelerate_configs/fsdp2.yaml run_clm.py --train_shards shards ...

A process that was killed is continued by the same command; it also mends shards that were lost or changed.
"""

import json
import sys
from dataclasses import MISSING, dataclass
from pathlib import Path

from datasets import disable_progress_bars

from hope_hf.cli.flags import COUNT, SEED, THREADS, check_output, flag
from hope_hf.cli.folder_lock import FolderLock
from hope_hf.cli.parser import Parser
from hope_hf.cli.process import complain
from hope_hf.cli.program import program

from .corpora import check_cache, open_corpus
from .mixture import read_mixture
from .preparation import Preparation, require_own
from .shard_manifest import MANIFEST
from .vocabulary import load_tokenizer


@dataclass
class Arguments:
    """All flags."""

    tokenizer_name: str = flag(MISSING, "Tokenizer of the model that will be trained (folder or Hub name).")
    output_dir: str = flag(MISSING, "Folder for the shards and their manifest.")
    validation_split_percentage: float = flag(
        1.0, "Percentage of each corpus's documents held out for validation.", above=0, below=100
    )
    max_eval_samples: int = flag(1000, "Validation documents of each corpus at most.", **COUNT)
    seed: int = flag(42, "Draws the documents where a corpus is limited.", **SEED)
    shard_tokens: int = flag(1 << 26, "A shard ends when it has so many tokens.", least=1 << 10, most=1 << 32)
    num_proc: int = flag(1, "Processes that tokenize; one uses all cores where the tokenizer does.", **THREADS)


# Flags that change what is written.
_SETTINGS = ("seed", "validation_split_percentage", "max_eval_samples", "shard_tokens")


def make_parser() -> Parser:
    """All flags."""
    return Parser(
        Arguments,
        prog="python -m hope_hf.data.prepare",
        usage="%(prog)s mixture.yaml --tokenizer_name NAME --output_dir DIR [flags]",
        description="Tokenize a mixture of corpora into shards.",
        allow_abbrev=False,
    )


@program
def main(argv: list[str]) -> int:
    """Returns 0, 1 where memory is full, 2 after a mistake of the user, or 130 after Ctrl-C."""
    # The bar of the shards is the only one.
    disable_progress_bars()
    try:
        mixture, words = (None, argv) if not argv or argv[0].startswith("-") else (argv[0], argv[1:])
        (args,) = make_parser().parse_args_into_dataclasses(words, look_for_args_file=False)
        if mixture is None:
            raise ValueError("The mixture is missing: name a YAML file of corpora as first word.")
        check_output(args.output_dir, "--output_dir")
        _prepare(mixture, args)
    except ValueError as error:
        return complain(error, 2)
    except MemoryError:
        return complain("Memory is full: free some, or lower --num_proc; the same command goes on where it was.", 1)
    except KeyboardInterrupt:
        return complain("stopped; the same command goes on where it was.", 130)
    return 0


def _prepare(mixture: str, args: Arguments) -> None:
    corpora = read_mixture(mixture)
    for corpus in corpora:
        if corpus.shards:
            raise ValueError(f"The mixture {mixture}, corpus {corpus.name}, is shards already: leave it out.")
    tokenizer = load_tokenizer(args.tokenizer_name)
    folder = Path(args.output_dir)
    lock = FolderLock(folder)
    lock.acquire()
    try:
        require_own(folder)
        share = args.validation_split_percentage
        check_cache(corpora, share, args.seed, tokenizer, folder)
        documents = [open_corpus(corpus, share, args.max_eval_samples, args.seed, tokenizer) for corpus in corpora]
        settings = {name: getattr(args, name) for name in _SETTINGS}
        preparation = Preparation(folder, documents, tokenizer, settings)
        preparation.check_folder()
        preparation.check_room()
        preparation.write(args.num_proc, args.shard_tokens, sys.stderr.isatty())
    except OSError as error:
        raise ValueError(f"--output_dir {folder} cannot be written: {error.strerror or error}.") from error
    finally:
        lock.release()
    _report(folder)


def _report(folder: Path) -> None:
    corpora = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["corpora"]
    for name, corpus in corpora.items():
        train, validation = corpus["train"], corpus["validation"]
        dropped = ", ".join(f"{reason} {count:,}" for reason, count in corpus["dropped"].items())
        print(
            f"{name}: {train['documents']:,} documents, {train['tokens']:,} tokens in {len(train['shards'])} shards; "
            f"validation {validation['documents']:,}, {validation['tokens']:,}"
            + (f"; dropped: {dropped}" if dropped else "")
        )
    print(f"Train on them with --train_shards {folder}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
