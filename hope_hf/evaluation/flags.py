"""Flags of `hope-hf eval`, and how a command line becomes checked `Arguments`.

The flags of the model and the text are those of `hope-hf train`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from typing import Literal

from hope_hf.common.flags import (
    COUNT,
    DEVICE,
    LONGEST,
    ROWS,
    SEED,
    TEXT_SOURCES,
    THREADS,
    Bounds,
    TextArguments,
    check_streaming,
    files_flag,
    flag,
    warn_of_text_flags,
)
from hope_hf.common.parser import Parser, flag_of, named_flags, nearest
from hope_hf.common.process import warn_once
from hope_hf.common.recipe import is_recipe, replaced, split_recipe

# The value of `--batch_size` with which lm-eval finds the size by trying.
AUTO = "auto"
# The suite of all tasks that no suite defines.
LM_EVAL = "zero_shot"


@dataclass
class SubjectArguments:
    """Which model is measured."""

    _argument_group_name = "model"

    model_name_or_path: str | None = flag(None, "The model: folder of a run or of a saved model, or Hub name.")
    tokenizer_name: str | None = flag(None, "Tokenizer, if not the model's own (folder or Hub name).")
    trust_remote_code: bool = flag(False, "Allow model code from the Hub to run on this machine.")
    attn_implementation: str | None = flag(None, "Attention kernel: sdpa, eager, flash_attention_2, ...")


@dataclass
class HeldOutArguments(TextArguments):
    """Which text is read. Without a data set or file: what the model's own run held out."""

    validation_file: list | str | None = files_flag(
        "Text: .txt, .json, .jsonl, .csv, .tsv or .parquet, also as .gz or .zst (default: what the model's run held "
        "out)."
    )


@dataclass
class SuiteArguments:
    """What is measured."""

    _argument_group_name = "suites"

    suite: str = flag(
        "perplexity,sample",
        "Comma-separated suites: perplexity, passkey, needle, recall, memory, zero_shot, continual, "
        "class_incremental, sample.",
    )
    lengths: str | None = flag(None, "Comma-separated lengths in tokens; k is 1,024 (1k,2k,4k).")
    depths: str = flag("0,0.25,0.5,0.75,1", "passkey, needle: position of the key, from 0 (first) to 1 (last).")
    samples_per_length: int = flag(
        4,
        "passkey, needle: samples per length and depth. perplexity: texts per longest length. recall: texts.",
        least=1,
        most=10_000,
    )
    samples_per_class: int = flag(2, "class_incremental: test sentences of each class.", **COUNT)
    tasks: str | None = flag(
        None,
        "Comma-separated tasks. needle, recall, class_incremental: their own (default: all); zero_shot: "
        "lm-eval's, YAML files with --trust_remote_code, or paper for the nine of the paper (default).",
    )
    num_fewshot: int | None = flag(
        None,
        "Examples in the context. zero_shot: default the task's own; class_incremental: of each class (default: 1).",
        least=0,
        most=1000,
    )
    max_length: int | None = flag(
        None, "zero_shot: the most tokens of a sequence (default: the model's positions).", least=2, most=LONGEST
    )
    log_samples: bool = flag(False, "zero_shot: write every document, request and answer to --output_dir.")
    data_dir: str | None = flag(
        None,
        "Folder of data. zero_shot: TASK_SPLIT.jsonl (.json, .parquet), not the Hub; class_incremental: its files.",
    )
    limit: int | None = flag(None, "Use at most N samples per measurement; the report is marked as limited.", **COUNT)
    max_train_steps: int | None = flag(
        None, "class_incremental: steps of fine-tuning on each group (default: 100).", **COUNT
    )
    learning_rate: float | None = flag(
        None,
        "class_incremental, continual: learning rate of fine-tuning (default: 5e-4, 5e-5).",
        above=0,
        below=1,
    )
    segments: str | None = flag(
        None,
        "continual: a YAML file with a corpus for each segment, in the keys of --dataset_mixture (default: what the "
        "run's --dataset_mixture or --train_shards hold out).",
    )
    prompts: str | None = flag(
        None, "sample: a text file with one prompt per line (default: the beginnings of documents)."
    )
    max_new_tokens: int | None = flag(
        None, "Tokens of each continuation (default: sample 64, needle 128).", least=1, most=1_000_000
    )


@dataclass
class RunArguments:
    """How it is measured, and where the report goes."""

    _argument_group_name = "run"

    output_dir: str | None = flag(None, "Folder of results.json, results.md and pictures (default: print only).")
    checkpoints: str | None = flag(
        None,
        "Evaluate checkpoints of the run in --model_name_or_path: all, or every:N steps; those with a report are "
        "skipped.",
    )
    compare: list[str] | None = flag(
        None, "Compare these reports (folders or files) with the first one; nothing is evaluated."
    )
    archive_dir: str | None = flag(None, "Keep every report as RUN/TIME.json in this folder; nothing is overwritten.")
    report_to: str = flag("none", "Trackers of numbers and pictures: none, or comma-separated (wandb,tensorboard).")
    batch_size: str | None = flag(None, "Rows per forward pass (default: 8); zero_shot: auto, as many as fit.")
    offline: bool = flag(False, "Do not contact the Hub: models, tokenizers and data are local or in its cache.")
    dtype: Literal["float32", "bfloat16", "float64"] = flag("float32", "Dtype of the weights.")
    device: str | None = flag(None, DEVICE)
    seed: int = flag(42, "Seed of samples, and of fine-tuning.", **SEED)
    cpu_threads: int | None = flag(None, "Threads (default: OMP_NUM_THREADS, or all cores).", **THREADS)


@dataclass
class Arguments(SubjectArguments, HeldOutArguments, SuiteArguments, RunArguments):
    """All flags of an evaluation, flat."""

    _argument_group_name = None

    @property
    def given_rows(self) -> int | None:
        """`--batch_size` if it is a number, else None."""
        return None if self.batch_size in (None, AUTO) else int(self.batch_size)

    @property
    def rows(self) -> int:
        """Rows per forward pass of a loaded model."""
        return self.given_rows or 8

    @property
    def texts_per_length(self) -> int:
        """`--samples_per_length`, but not more than `--limit`."""
        return min(self.samples_per_length, self.limit or self.samples_per_length)


# The flags that a suite reads for its model.
MODEL = ("model_name_or_path", "tokenizer_name", "trust_remote_code", "attn_implementation", "dtype")
# Flags of a text: those that name it, and those that set which part of it is held out.
NAMING = (*TEXT_SOURCES, "validation_file")
SHARE = (
    "dataset_config_name",
    "text_column",
    "on_bad_rows",
    "validation_split_percentage",
    "max_eval_samples",
    "streaming",
)
TEXT = (*NAMING, *SHARE, "trust_remote_code")
# The flags that the program itself reads.
ALWAYS = frozenset(
    "suite output_dir checkpoints compare archive_dir report_to offline device cpu_threads model_name_or_path".split()
)


@dataclass(frozen=True)
class Suite:
    """A suite of measurements, and what it offers.

    measure: `measure(args, subject) -> SuiteResult`. It writes nothing; a mistake raises ValueError of one sentence.
    reads: the flags that it reads. Other given flags raise a warning.
    tasks: the names of `--tasks` that the suite defines.
    needs_memory: whether it measures self-modifying memories.
    over_checkpoints: whether it loads the models itself, all checkpoints of a run. For the others the program loads
        one model, as `subject`.
    in_processes: whether several processes can share its work.
    package: what it imports besides the package's own requirements, if anything.
    """

    measure: Callable
    reads: frozenset[str]
    tasks: Collection[str] = ()
    needs_memory: bool = False
    over_checkpoints: bool = False
    in_processes: bool = False
    package: str | None = None

    def __call__(self, args: Arguments, subject=None):
        """Call `measure`."""
        return self.measure(args, subject)


def suite(*reads: str, **offers) -> Callable[[Callable], Suite]:
    """Decorates the function of a suite: the flags that it reads, and the other fields of `Suite`."""
    return lambda measure: Suite(measure, frozenset(reads), **offers)


# Flags of a first day.
FIRST = (
    "model_name_or_path", "suite", "validation_file", "output_dir", "tasks", "lengths", "limit", "batch_size",
    "device", "dtype",
)  # fmt: skip
GROUPS = (SubjectArguments, HeldOutArguments, SuiteArguments, RunArguments)
FLAGS = tuple(f.name for group in GROUPS for f in fields(group))
# Flags that a recipe of a training may contain.
TRAINING_ONLY = ("max_train_samples", "preprocessing_num_workers")


def parse(argv: list[str], suites: dict[str, Suite]) -> Arguments:
    """Read `[recipe.yaml] [MODEL] --flag value ...`; flags override the recipe, the recipe overrides the defaults.

    MODEL is the value of `--model_name_or_path`. `--tasks` without `--suite` chooses the suites that define these
    tasks. Raises ValueError with one sentence that names the flag or file and the fix.
    """
    recipe = []
    if argv and is_recipe(argv[0]):
        recipe, argv = split_recipe(argv, FLAGS)
    if argv and not argv[0].startswith("-"):
        model, *argv = argv
        if any(flag_of(word) == "model_name_or_path" for word in argv):
            raise ValueError(f"{model!r} and --model_name_or_path both name the model: give one of them.")
        argv = [f"--model_name_or_path={model}", *argv]
    parser = Parser(
        GROUPS,
        prog="hope-hf eval",
        usage="%(prog)s [recipe.yaml] MODEL --suite NAMES [flags]",
        description="Evaluate a causal language model. Command-line flags override the recipe.",
        example="hope-hf eval runs/demo --suite perplexity,needle --output_dir runs/eval",
        link="docs/evaluation.md",
        first=FIRST,
        allow_abbrev=False,
    )
    recipe = replaced(recipe, named_flags(parser, argv, FLAGS))
    named = named_flags(parser, recipe + argv, FLAGS)
    groups = parser.parse_groups(recipe + argv)
    values = {}
    for group in groups:
        values |= vars(group)
    args = Arguments(**values)
    if "tasks" in named and "suite" not in named:
        owners = [_owner(task, suites) for task in names(args.tasks)]
        args.suite = ",".join(dict.fromkeys(owners)) or LM_EVAL
    _check(args, suites)
    _warn_of_ignored(args, named, suites)
    return args


def _owner(task: str, suites: dict[str, Suite]) -> str:
    """The suite that defines a task."""
    for name, one in suites.items():
        if task in one.tasks:
            return name
    return LM_EVAL


def names(text: str) -> list[str]:
    """The words of a comma-separated list, in order, each once."""
    words = map(str.strip, text.split(","))
    return list(dict.fromkeys(filter(None, words)))


def chosen_tasks(args: Arguments, suite: str, known: Collection[str]) -> list[str]:
    """The names of `--tasks`; all `known` ones without the flag. Raises ValueError for no name and unknown names."""
    if args.tasks is None:
        return list(known)
    chosen = names(args.tasks)
    for name in chosen:
        if name not in known:
            raise ValueError(f"--tasks {name} is none of {', '.join(known)}{nearest(name, known)}")
    if not chosen:
        raise ValueError(f"--tasks names no {suite} task: choose among {', '.join(known)}.")
    return chosen


def parse_lengths(text: str) -> list[int]:
    """`1k,2k,65536` as ascending numbers of tokens (k is 1,024). Raises ValueError naming --lengths."""
    lengths = set()
    for word in names(text.lower()):
        number = word.removesuffix("k")
        factor = 1 if number == word else 1024
        if not _is_count(number):
            raise ValueError(f"--lengths {text!r} has {word!r}: write whole numbers of tokens, such as 512,1k,64k.")
        lengths.add(int(number) * factor)
    if not lengths:
        raise ValueError("--lengths is empty: write whole numbers of tokens, such as 512,1k,64k.")
    if max(lengths) > LONGEST:
        raise ValueError(f"--lengths {text!r} has more than {LONGEST:,} tokens: lower it.")
    return sorted(lengths)


def parse_depths(text: str) -> list[float]:
    """`0,0.5,1` as ascending numbers from 0 to 1. Raises ValueError naming --depths."""
    try:
        depths = sorted({float(word) for word in names(text)})
    except ValueError:
        depths = []
    if not depths or not all(0 <= depth <= 1 for depth in depths):
        raise ValueError(f"--depths {text!r} must be comma-separated numbers from 0 to 1, such as 0,0.5,1.")
    return depths


def parse_checkpoints(text: str | None) -> int:
    """`all` or `every:N` as the number that divides the steps. Raises ValueError naming --checkpoints."""
    if text in (None, "all"):
        return 1
    word, _, number = text.partition(":")
    if word != "every" or not _is_count(number):
        raise ValueError(f"--checkpoints {text!r} is neither all nor every:N, such as every:1000.")
    return int(number)


def _is_count(word: str) -> bool:
    """Whether a word is a whole number above 0."""
    # Python refuses to read thousands of digits.
    return word.isdecimal() and len(word) <= 20 and int(word) > 0


def _check(args: Arguments, suites):
    running = names(args.suite)
    if not running:
        raise ValueError(f"--suite {args.suite!r} is empty: choose among {', '.join(suites)}.")
    for name in running:
        if name not in suites:
            raise ValueError(f"--suite {name} is none of {', '.join(suites)}{nearest(name, suites)}")
    if args.log_samples and LM_EVAL in running and not args.output_dir:
        raise ValueError("--log_samples writes files: name their folder with --output_dir.")
    rows = args.batch_size
    bounds = Bounds(**ROWS)
    is_number = _is_count(rows or "") and bounds.admit(int(rows))
    if rows not in (None, AUTO) and not is_number:
        raise ValueError(f"--batch_size is {rows!r}: give a whole number {bounds.words()}, or auto.")
    parse_checkpoints(args.checkpoints)
    if args.report_to != "none" and not args.output_dir:
        raise ValueError("--report_to needs a folder for pictures and the trackers' files: name it with --output_dir.")
    if args.checkpoints and not args.model_name_or_path:
        raise ValueError("--checkpoints needs a run: name its folder with --model_name_or_path.")
    if args.lengths is not None:
        parse_lengths(args.lengths)
    parse_depths(args.depths)
    for name in TEXT_SOURCES:
        if name != "train_file" and args.validation_file and getattr(args, name):
            raise ValueError(f"--{name} and --validation_file both name the text: give one of them.")
    check_streaming(args)


def _warn_of_ignored(args: Arguments, named: set[str], suites):
    if args.compare:
        for name in sorted(named - {"compare", "output_dir"}):
            warn_once(f"--{name} is ignored: --compare evaluates nothing.")
        return
    running = names(args.suite)
    for name in sorted(named - ALWAYS):
        readers = [suite for suite in suites if name in suites[suite].reads]
        if readers and not set(readers) & set(running):
            warn_once(f"--{name} is ignored: it is for --suite {' or '.join(readers)}.")
    if args.batch_size == AUTO and set(running) != {LM_EVAL}:
        warn_once("--batch_size auto is for --suite zero_shot: the other suites take their default.")
    for name in TRAINING_ONLY:
        if name in named:
            warn_once(f"--{name} is ignored: it sets how hope-hf train reads its training text.")
    if args.prompts and set(running) == {"sample"}:
        for name in sorted(named & set(TEXT) - {"trust_remote_code"}):
            warn_once(f"--{name} is ignored: --prompts is given.")
    warn_of_text_flags(args, named - {*TRAINING_ONLY})
