"""Flags of `run_eval.py`: those of the model and the text are `run_clm.py`'s."""

from dataclasses import dataclass, fields
from typing import Literal

from hope_hf.cli.flags import COUNT, LONGEST, SEED, THREADS, ModelArguments, TextArguments, flag

# The `--batch_size` that lm-eval finds by trying.
AUTO = "auto"


@dataclass
class SuiteArguments:
    """What is measured."""

    _argument_group_name = "suites"

    suite: str = flag(
        "perplexity,sample",
        "Suites with commas: perplexity, passkey, needle, memory, synthetic, zero_shot, continual, "
        "class_incremental, sample.",
    )
    lengths: str | None = flag(None, "Lengths in tokens with commas between them; k is 1,024 (1k,2k,4k).")
    depths: str = flag("0,0.25,0.5,0.75,1", "passkey, needle: position of the key, from 0 (first) to 1 (last).")
    samples_per_length: int = flag(
        4,
        "passkey, needle: samples per length and depth. perplexity: texts per longest length.",
        least=1,
        most=10_000,
    )
    samples_per_class: int = flag(2, "class_incremental: test sentences of each class.", **COUNT)
    tasks: str | None = flag(
        None,
        "Tasks with commas between them. synthetic, needle, class_incremental: their own (default: all); zero_shot: "
        "lm-eval's, YAML files, or paper for the nine of the paper (default).",
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
    limit: int | None = flag(None, "Use at most N samples of everything; marked in the report.", **COUNT)
    max_train_steps: int | None = flag(
        None,
        "Steps of training. synthetic: default the task's own; class_incremental: of each group (default: 100).",
        **COUNT,
    )
    learning_rate: float | None = flag(
        None,
        "synthetic: peak learning rate (default: the task's own); class_incremental: of fine-tuning (default: 5e-4).",
        above=0,
        below=1,
    )
    ema_decay: float = flag(
        0.0,
        "synthetic: decay per step of a moving mean of the weights, tested as well (0: none).",
        least=0,
        below=1,
    )
    num_seeds: int = flag(1, "synthetic: models trained per task, with seeds --seed, --seed + 1, ...", **COUNT)
    segments: str | None = flag(
        None,
        "continual: a YAML file with a corpus for each segment, in the keys of --dataset_mixture (default: what the "
        "run's --dataset_mixture or --train_shards hold out).",
    )
    prompts: str | None = flag(None, "sample: a text file with one prompt a line (default: the text's beginnings).")
    max_new_tokens: int | None = flag(
        None, "Tokens of each continuation (default: sample 64, needle 128).", least=1, most=1_000_000
    )


@dataclass
class RunArguments:
    """How it is measured, and where the report goes."""

    _argument_group_name = "run"

    output_dir: str | None = flag(None, "Folder of results.json, results.md and pictures (default: print only).")
    checkpoints: str | None = flag(
        None, "Evaluate checkpoints of the run in --model_name_or_path: all, or every:N steps; those done are skipped."
    )
    compare: list[str] | None = flag(
        None, "Evaluate nothing: set these reports side by side (folders or files; the differences are to the first)."
    )
    archive_dir: str | None = flag(None, "Keep every report as RUN/TIME.json in this folder; nothing is overwritten.")
    report_to: str = flag("none", "Trackers of numbers and pictures: none, wandb, tensorboard, with commas.")
    batch_size: str | None = flag(
        None, "Rows per forward pass (default: 8; synthetic: the task's own); zero_shot: auto, as many as fit."
    )
    offline: bool = flag(False, "Ask the Hub for nothing: models, tokenizers and data are local or in its cache.")
    dtype: Literal["float32", "bfloat16", "float64"] = flag("float32", "Type of the weights.")
    device: str | None = flag(None, "cpu, cuda, cuda:1, ... (default: the accelerator, if there is one).")
    seed: int = flag(42, "Seed of samples, and of models that are trained.", **SEED)
    cpu_threads: int | None = flag(None, "Threads (default: OMP_NUM_THREADS, or all cores).", **THREADS)


@dataclass
class Arguments(ModelArguments, TextArguments, SuiteArguments, RunArguments):
    """All flags of an evaluation, flat."""

    _argument_group_name = None

    @property
    def given_rows(self) -> int | None:
        """`--batch_size` where it is a number."""
        return None if self.batch_size in (None, AUTO) else int(self.batch_size)

    @property
    def rows(self) -> int:
        """Rows per forward pass of a loaded model."""
        return self.given_rows or 8

    @property
    def texts_per_length(self) -> int:
        """`--samples_per_length`, and no more than `--limit`."""
        return min(self.samples_per_length, self.limit or self.samples_per_length)


# What a suite that loads a model, and one that reads the held-out text, take from the command line.
MODEL = ("model_name_or_path", "tokenizer_name", "trust_remote_code", "attn_implementation", "dtype")
TEXT = (
    "dataset_name", "dataset_config_name", "train_file", "dataset_mixture", "train_shards", "validation_file",
    "validation_split_percentage", "max_eval_samples", "streaming", "trust_remote_code",
)  # fmt: skip
# What the program itself reads, whatever is measured.
ALWAYS = frozenset(
    "suite output_dir checkpoints compare archive_dir report_to offline device cpu_threads model_name_or_path".split()
)


def reads(*flags: str):
    """Decorates a suite with the names of the flags that it reads; others that are given are warned of."""

    def declare(suite):
        suite.reads = frozenset(flags)
        return suite

    return declare


GROUPS = (ModelArguments, TextArguments, SuiteArguments, RunArguments)
FLAGS = tuple(f.name for group in GROUPS for f in fields(group))
