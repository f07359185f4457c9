"""Makes commands, names and tables safe to publish, and writes text from outside as Markdown.

Values that are not known to be public are left out.
"""

import html
import re
import shlex
from pathlib import PureWindowsPath

from hope_hf.common.flags import as_list, is_hub_name
from hope_hf.common.parser import flag_of

# Flags whose value may be a name on the Hub.
HUB_NAMES = {"model_name_or_path", "config_name", "tokenizer_name", "dataset_name", "hub_model_id"}
FILES = {
    "train_file", "validation_file", "dataset_mixture", "train_shards", "level_optimizers", "resume_from_checkpoint",
    "output_dir", "data_dir", "tasks", "segments", "prompts", "compare",
}  # fmt: skip
WORDS = {
    "model_type", "config_overrides", "attn_implementation", "dataset_config_name", "document_boundary",
    "lr_scheduler_type", "optimizer", "init", "gradient_checkpointing", "fsdp_reduce_dtype", "profile_steps", "suite",
    "lengths", "depths", "batch_size", "dtype", "device", "checkpoints", "train_only", "long_chats",
    "text_column", "on_bad_rows", "lr_scheduler_kwargs", "stop_after", "keep_best",
}  # fmt: skip
SHOWN = HUB_NAMES | FILES | WORDS
"""Flags whose text is published. Of all other flags only switches and numbers are published: a shell line, a project
name or a flag added later may hold a password."""
# An absolute path up to its last separator. Its folders may have blanks.
FOLDERS = re.compile(r"(?<![\w./\\])(?:(?:~|[A-Za-z]:)[/\\](?:.*[/\\])?|[/\\](?=\S).*[/\\])")


def printable(value: object) -> str:
    """`value` as one line."""
    letters = [letter if letter.isprintable() else " " for letter in str(value)]
    return " ".join("".join(letters).split())


def public_value(flag: str, value: str) -> str:
    """The value of a flag in `SHOWN` on one line; a path is cut to its last part."""
    value = printable(value)
    if flag in WORDS or (flag in HUB_NAMES and is_hub_name(value)):
        return FOLDERS.sub("", value)
    # PureWindowsPath splits at both kinds of separators.
    return PureWindowsPath(value).name if "/" in value or "\\" in value else value


def public_command(words: list[str]) -> str:
    """A command line, program first, as typed in the folder of its files; flags that may be private are left out."""
    public = []
    flag = None
    for word in words:
        if word.startswith("--"):
            flag = flag_of(word)
            _, equals, value = word.partition("=")
            if flag in SHOWN:
                public.append(f"--{flag}{equals}{public_value(flag, value)}")
            elif flag.isidentifier() and (not equals or _is_plain(value)):
                public.append(f"--{flag}{equals}{value}")
        elif flag is None:
            # The words before all flags are the program and a recipe.
            public.append(public_value("output_dir", word))
        elif flag in SHOWN:
            public.append(public_value(flag, word))
        elif _is_plain(word):
            public.append(word)
        elif public[-1] == f"--{flag}":
            public.pop()
    if public[0].endswith(".py"):
        public.insert(0, "python")
    return shlex.join(public)


def without_folders(text: str, flags: dict) -> str:
    """`text` on one line, with every absolute path and every path among the values of `flags` cut to its last part."""
    text = printable(text)
    public = {}
    for flag, values in flags.items():
        for value in as_list(values):
            if isinstance(value, str):
                public.setdefault(printable(value), public_value(flag, value))
    public.pop("", None)
    for value in sorted(public, key=len, reverse=True):
        text = text.replace(value, public[value])
    return FOLDERS.sub("", text)


def _is_plain(value: str) -> bool:
    """Whether it is a number or a switch."""
    return re.fullmatch(r"[-+]?[0-9.]+(e[-+]?[0-9]+)?|true|false", value, re.IGNORECASE | re.ASCII) is not None


def as_text(value: object) -> str:
    """`value` on one line, in which no character acts as markup, HTML or the edge of a table's cell."""
    # Underscores within a word are no markup.
    return re.sub(r"[\\`*~$|\[\]]|(?<![^\W_])_+|_+(?![^\W_])", _escaped, html.escape(printable(value), quote=False))


def as_code_block(*lines: object) -> str:
    """Every one of `lines` on one line, as a block of code."""
    code = "\n".join(map(printable, lines))
    fence = "```"
    # The fence is longer than any fence in the code.
    while fence in code:
        fence += "`"
    return f"{fence}\n{code}\n{fence}"


def _escaped(found: re.Match) -> str:
    return "".join(f"\\{letter}" for letter in found[0])
