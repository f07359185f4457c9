"""Flags of `hope-hf chat` and `hope-hf generate`."""

from dataclasses import dataclass, field, fields
from typing import Literal

from hope_hf.common.flags import DEVICE, LONGEST, SEED, THREADS, Checked, check_output, flag
from hope_hf.common.parser import Parser, named_flags

EXAMPLE = "hope-hf chat converted --learn --file book.txt --memory memories/book"
# What `--help` shows for the values of flags.
SHOWN = {"memory": "FOLDER", "file": "FILE", "prompt": "TEXT", "do_sample": "true|false"}
DRAWS = {"temperature", "top_p", "top_k", "min_p"}


@dataclass
class KeptArguments:
    """What remains of what is read."""

    _argument_group_name = "most used"

    memory: str | None = flag(
        None, "Folder that keeps what was read and learned: continued if it exists, saved at the end."
    )
    learn: bool = flag(False, "Let the levels learn from what is read: files, messages, prompts.")
    archive: bool = flag(True, "Keep the words of what is read, 3 or 4 bytes a token; --no_archive: do not.")


@dataclass
class PromptArguments(KeptArguments):
    """What `hope-hf generate` reads."""

    prompt: str | None = flag(None, "Text to continue (default: standard input).", is_text=True)


@dataclass
class TextArguments(KeptArguments):
    """What `hope-hf chat` reads."""

    file: list[str] | None = flag(None, "Text files that are read first, in this order.")
    prompt: list[str] | None = flag(
        None, "Messages that are answered, in this order, instead of those you type.", is_text=True
    )
    recall: bool = flag(
        False, "Before a message, read the passages again that fit its words best, of what was read before."
    )
    compare: bool = flag(False, "Also read the files with frozen levels, to show what learning brings; needs --learn.")


@dataclass
class LearningArguments:
    """What else the levels learn from, and how it is saved."""

    _argument_group_name = "memory"

    learn_generated: bool = flag(False, "Let the levels learn from the answers, too; needs --learn.")
    memory_dtype: Literal["float32", "bfloat16", "int8"] = flag(
        "float32", "How --memory holds what levels have learned: bfloat16 takes a half of the space, int8 a quarter."
    )


@dataclass
class AnswerArguments:
    """How answers are chosen, named as in transformers."""

    _argument_group_name = "answers"

    max_new_tokens: int = flag(256, "Most tokens of an answer.", least=1, most=LONGEST)
    do_sample: bool | None = field(
        default=None,
        metadata={"help": "true: draw tokens; false: take the likeliest (default: what the model's folder says)."},
    )
    temperature: float | None = flag(None, "Lower values draw likelier tokens.", least=0.001, most=100)
    top_p: float | None = flag(None, "Draw among the likeliest tokens of this total probability.", above=0, most=1)
    top_k: int | None = flag(None, "Draw among so many likeliest tokens; 0: among all.", least=0, most=LONGEST)
    min_p: float | None = flag(
        None, "Draw among tokens of at least this share of the likeliest one's probability.", above=0, most=1
    )
    repetition_penalty: float | None = flag(
        None, "Above 1: tokens that have come before are less likely.", least=0.01, most=100
    )
    seed: int = flag(0, "Seed of the draws.", **SEED)


@dataclass
class MachineArguments:
    """How the model is loaded."""

    _argument_group_name = "machine"

    tokenizer_name: str | None = flag(None, "Tokenizer, if not the model's own (folder or Hub name).")
    device: str | None = flag(None, DEVICE)
    dtype: Literal["auto", "float32", "bfloat16"] = flag("auto", "Of the weights; auto: as they were saved.")
    cpu_threads: int | None = flag(None, "Threads (default: OMP_NUM_THREADS, or free cores).", **THREADS)


@dataclass
class Arguments(TextArguments, LearningArguments, AnswerArguments, MachineArguments):
    """All flags, flat, and MODEL."""

    _argument_group_name = None

    model: str = flag("", "Folder or Hub name of a HOPE.")


@dataclass
class GenerateArguments(PromptArguments, LearningArguments, AnswerArguments, MachineArguments):
    """All flags of `hope-hf generate`, flat, and MODEL."""

    _argument_group_name = None

    model: str = flag("", "Folder or Hub name of a HOPE.")


GROUPS = (LearningArguments, AnswerArguments, MachineArguments)


def make_parser() -> Parser:
    """All flags of `hope-hf chat`; MODEL is the one word without a flag."""
    return _parser(
        TextArguments,
        prog="hope-hf chat",
        usage="%(prog)s MODEL [--memory FOLDER] [--learn] [--file FILE ...] [--prompt TEXT ...] [flags]",
        description="Read files with a model and talk to it, while its levels learn.",
        example=EXAMPLE,
    )


def make_generate_parser() -> Parser:
    """All flags of `hope-hf generate`; MODEL is the one word without a flag."""
    return _parser(
        PromptArguments,
        prog="hope-hf generate",
        usage="%(prog)s MODEL --prompt TEXT [--memory FOLDER] [flags]",
        description="Continue a text. The continuation goes to standard output, all else to standard error.",
        example='hope-hf generate runs/demo --prompt "def read_file(path):" --temperature 0.8',
    )


def _parser(own: type, **words: str) -> Parser:
    """The flags of the program's own group and the shared ones, and MODEL."""
    parser = Parser((own, *GROUPS), link="docs/convert.md", allow_abbrev=False, **words)
    for action in parser._actions:
        action.metavar = SHOWN.get(action.dest, action.metavar)
    parser.add_argument("model", metavar="MODEL", action=Checked, help="folder or Hub name of a HOPE")
    return parser


def parse(argv: list[str]) -> Arguments:
    """The flags of `hope-hf chat`; ValueError for a mistake in them."""
    return _parse(make_parser(), Arguments, argv)


def parse_generate(argv: list[str]) -> GenerateArguments:
    """The flags of `hope-hf generate`; ValueError for a mistake in them."""
    return _parse(make_generate_parser(), GenerateArguments, argv)


def _parse(parser: Parser, kind: type, argv: list[str]):
    named = named_flags(parser, argv, [f.name for f in fields(kind) if f.name != "model"])
    args = kind(**vars(parser.parse_args(argv)))
    for name in ("compare", "learn_generated"):
        if getattr(args, name, False) and not args.learn:
            raise ValueError(f"--{name} is about learning: add --learn, or leave --{name} out.")
    if getattr(args, "recall", False) and not args.archive:
        raise ValueError("--recall searches the words that --no_archive drops: leave one of them out.")
    drawn = sorted(named & DRAWS)
    if drawn and args.do_sample is False:
        raise ValueError(f"--{drawn[0]} is for drawn tokens: leave it out, or --do_sample false.")
    if args.memory is not None:
        check_output(args.memory, "--memory")
    elif "memory_dtype" in named:
        raise ValueError("--memory_dtype is about saving: add --memory FOLDER, or leave --memory_dtype out.")
    return args
