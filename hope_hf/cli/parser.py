"""The command-line parser of all programs: transformers' parser, with one sentence for each mistake."""

import difflib
import os
import sys
from collections.abc import Collection

from transformers import HfArgumentParser

from .usual_names import our_name


class Parser(HfArgumentParser):
    """HfArgumentParser with one spelling of each flag, which raises ValueError instead of printing the usage.

    A word such as `--output-dir` is read as `--output_dir`, and messages and `--help` name the latter alone.
    """

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        # HfArgumentParser adds each flag with dashes as well.
        for action in self._actions:
            action.option_strings = [name for name in action.option_strings if "-" not in name[2:]]

    def parse_known_args(self, args=None, namespace=None):
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._spelled(word) for word in words], namespace)

    def error(self, message):
        raise ValueError(f"{message[0].upper()}{message[1:]}; {self.prog} --help lists the flags.")

    def _spelled(self, word: str) -> str:
        flag = f"--{flag_of(word)}"
        if flag in self._option_string_actions and word[len(flag) :] == "=--":
            # argparse would drop the value.
            self.error(f"argument {flag}: '--' is no value")
        return flag + word[len(flag) :] if flag in self._option_string_actions else word


def flag_of(word: str) -> str:
    """`some_flag` for the words `--some_flag`, `--some-flag` and `--some_flag=value`; empty for others."""
    return word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def nearest(name: str, known, most: int = 1) -> str:
    """'; did you mean X?' with at most `most` names for a misspelled or a usual one, '' if none is close."""
    dashes = "--" if name.startswith("--") else ""
    plain = [other.removeprefix(dashes) for other in known]
    usual = our_name(name.removeprefix(dashes), plain)
    if usual is None:
        matches = difflib.get_close_matches(name.removeprefix(dashes), plain, n=most, cutoff=0.6)
    else:
        matches = [usual] if usual else []
    return f"; did you mean {' or '.join(dashes + match for match in matches)}?" if matches else ""


def named_flags(parser: Parser, words: list[str], flags: Collection[str]) -> set[str]:
    """Names of the flags among `words`; ValueError for one that does not exist."""
    namespace, unknown = parser.parse_known_args(words)
    for word in unknown:
        flag = word.split("=")[0]
        if flag.startswith("-"):
            known = [f"--{name}" for name in flags]
            raise ValueError(f"There is no flag {flag}{nearest(flag.replace('-', '_').replace('__', '--', 1), known)}")
        before = [flag_of(other) for other in words[: words.index(word)] if other.startswith("--")]
        if before and os.path.exists(word):
            raise ValueError(
                f"--{before[-1]} takes one value, and {word!r} is another: if the shell has put the files' names in "
                f"place of a pattern, quote the pattern (--{before[-1]} '*.txt')."
            )
        raise ValueError(f"The word {word!r} follows no flag: write --flag {word}, or a YAML file as first word.")
    named = [flag_of(word) for word in words if word.startswith("--")]
    return {name.removeprefix("no_") if name not in flags else name for name in named}
