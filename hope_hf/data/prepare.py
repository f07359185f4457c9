"""Tokenize a mixture of corpora once, into shards from which a training reads only what it needs.

    hope-hf prepare mix.yaml --tokenizer_name my_tokenizer --output_dir shards
    hope-hf train --train_shards shards ...

After a killed process the same command continues; it also rewrites shards that were lost or changed.
"""

from dataclasses import MISSING, dataclass

from hope_hf.common.files import at_home
from hope_hf.common.flags import COUNT, SEED, THREADS, check_output, flag, require_local
from hope_hf.common.parser import Parser
from hope_hf.common.process import print_error
from hope_hf.common.program import importing, program

from .mixture import Corpus, read_mixture


@dataclass
class Arguments:
    """All flags."""

    tokenizer_name: str = flag(MISSING, "Tokenizer of the model that will be trained (folder or Hub name).")
    output_dir: str = flag(MISSING, "Folder for the shards and their manifest.")
    validation_split_percentage: float = flag(
        1.0, "Percentage of each corpus's documents held out for validation.", above=0, below=100
    )
    max_eval_samples: int = flag(1000, "Validation documents of each corpus at most.", **COUNT)
    seed: int = flag(42, "Seed that draws the documents of corpora with a limit.", **SEED)
    shard_tokens: int = flag(1 << 26, "Tokens after which a shard ends.", least=1 << 10, most=1 << 32)
    num_proc: int = flag(1, "Number of processes that tokenize; one uses all cores with a fast tokenizer.", **THREADS)


def make_parser() -> Parser:
    """All flags."""
    return Parser(
        (Arguments,),
        prog="hope-hf prepare",
        usage="%(prog)s mixture.yaml --tokenizer_name NAME --output_dir DIR [flags]",
        description="Tokenize a mixture of corpora into shards.",
        example="hope-hf prepare mix.yaml --tokenizer_name tokenizers/mix --output_dir shards_mix",
        link="docs/data.md",
        allow_abbrev=False,
    )


@program
def main(argv: list[str]) -> int:
    """Returns 0, 1 where memory is full, 2 after a mistake of the user, or 130 after Ctrl-C."""
    has_mixture = bool(argv) and not argv[0].startswith("-")
    (args,) = make_parser().parse_groups(argv[1:] if has_mixture else argv)
    if not has_mixture:
        raise ValueError("The mixture is missing: name a YAML file of corpora as the first argument.")
    check_output(args.output_dir, "--output_dir")
    corpora = _corpora(at_home(argv[0]))
    require_local(args.tokenizer_name, "--tokenizer_name")
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        from datasets import disable_progress_bars

        from .preparation import prepare

    # Only the bar of the shards is shown.
    disable_progress_bars()
    try:
        prepare(corpora, args)
    except MemoryError:
        return print_error(
            "Memory is full: free some, or lower --num_proc; the same command continues where it stopped.", 1
        )
    except KeyboardInterrupt:
        return print_error("stopped; the same command continues where it stopped.", 130)
    return 0


def _corpora(mixture: str) -> list[Corpus]:
    corpora = read_mixture(mixture)
    for corpus in corpora:
        if corpus.shards:
            raise ValueError(f"The mixture {mixture}, corpus {corpus.name}, is tokenized already: leave it out.")
    return corpora
