"""Makes commands and tables safe to publish: file names, but no folders of this machine."""

import shlex
from collections.abc import Iterable
from pathlib import PureWindowsPath

from hope_hf.cli.hub import is_hub_name

# Flags whose value may be a name on the Hub; all other values with a separator are paths.
HUB_FLAGS = {"model_name_or_path", "config_name", "tokenizer_name", "dataset_name", "hub_model_id"}
NO_PATHS = {"config_overrides"}
# Shell lines, which may hold anything.
PRIVATE = {"checkpoint_hook"}


def public_value(flag: str, value: str) -> str:
    """The value of a flag; of a path only the last part, and nothing of a shell line."""
    if flag in PRIVATE:
        return "..." if value else value
    if flag in NO_PATHS or (flag in HUB_FLAGS and is_hub_name(value)):
        return value
    # It splits at both kinds of separators.
    return PureWindowsPath(value).name if "/" in value or "\\" in value else value


def public_command(words: Iterable[str]) -> str:
    """A command line, program first, as typed in the folder of its files."""
    shown, flag = [], ""
    for word in words:
        if word.startswith("--"):
            flag, equals, value = word[2:].partition("=")
            shown.append(f"--{flag}{equals}{public_value(flag, value)}")
        else:
            shown.append(public_value(flag, word))
    return shlex.join(["python", *shown])


def without_folders(text: str, flags: dict) -> str:
    """`text` with every path among the values of `flags` cut to its last part."""
    values = [(flag, value) for flag, value in flags.items() if isinstance(value, str) and value]
    for flag, value in sorted(values, key=lambda pair: -len(pair[1])):
        text = text.replace(value, public_value(flag, value))
    return text
