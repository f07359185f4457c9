"""The command-line parser of all programs: transformers' parser, with one sentence for each mistake."""

import difflib
from collections.abc import Collection

from transformers import HfArgumentParser


class Parser(HfArgumentParser):
    """HfArgumentParser that raises a one-sentence ValueError instead of printing the usage and exiting."""

    def error(self, message):
        raise ValueError(f"{message[0].upper()}{message[1:]}; {self.prog} --help lists the flags.")


def nearest(name: str, known, most: int = 1) -> str:
    """'; did you mean X?' with at most `most` names for a misspelled one, '' if none is close."""
    matches = difflib.get_close_matches(name, list(known), n=most, cutoff=0.5)
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def named_flags(parser: Parser, words: list[str], flags: Collection[str]) -> set[str]:
    """Names of the flags among `words`; ValueError for one that does not exist."""
    namespace, unknown = parser.parse_known_args(words)
    for word in unknown:
        flag = word.split("=")[0]
        if flag.startswith("-"):
            known = [f"--{name}" for name in flags]
            raise ValueError(f"There is no flag {flag}{nearest(flag.replace('-', '_').replace('__', '--', 1), known)}")
        raise ValueError(f"The word {word!r} follows no flag: write --flag {word}, or a YAML file as first word.")
    named = [word.split("=")[0][2:].replace("-", "_") for word in words if word.startswith("--")]
    return {name.removeprefix("no_") if name not in flags else name for name in named}
