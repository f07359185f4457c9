"""What the flags of the text must satisfy together, in training and in evaluation."""

from .arguments import TextArguments
from .process import warn_once

# Flags that name the training text; a run has one of them.
TEXT_SOURCES = ("dataset_name", "train_file", "dataset_mixture", "train_shards")
# What is said about one text, and not about another.
OF_ONE_TEXT = (
    *TEXT_SOURCES,
    "dataset_config_name",
    "validation_file",
    "validation_split_percentage",
    "max_train_samples",
    "streaming",
)


def check_streaming(args: TextArguments) -> None:
    """Raise ValueError where `--streaming` meets text that is not read as a stream."""
    if args.streaming and (args.dataset_mixture or args.train_shards):
        raise ValueError("--streaming is for --dataset_name and --train_file: leave it out.")


def warn_of_ignored_share(args: TextArguments, named: set[str]) -> None:
    """Warn where `--validation_split_percentage` was given and the text is not split by it."""
    if "validation_split_percentage" not in named:
        return
    if args.validation_file:
        warn_once("--validation_split_percentage is ignored: --validation_file is given.")
    if args.train_shards:
        warn_once("--validation_split_percentage is ignored: --train_shards holds its validation text.")
