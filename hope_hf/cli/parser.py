"""The house's way to read a command line: transformers' parser, YAML recipes, one sentence for each mistake."""

import difflib
import json
from collections.abc import Collection
from pathlib import Path

import yaml
from transformers import HfArgumentParser


class Parser(HfArgumentParser):
    """HfArgumentParser whose complaints are a ValueError of one sentence instead of a usage text and exit."""

    def error(self, message):
        raise ValueError(f"{message[0].upper()}{message[1:]}; {self.prog} --help lists the flags.")


def nearest(name: str, known, most: int = 1) -> str:
    """'; did you mean X?' with at most `most` names for a misspelled one, '' where nothing is near."""
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


def split_recipe(argv: list[str], flags: Collection[str]) -> tuple[list[str], list[str]]:
    """The words of a recipe that stands first (none where none does), and the words after it."""
    return ([], argv) if not argv or argv[0].startswith("-") else (read_recipe(argv[0], flags), argv[1:])


def require_at_least_one(args, names: Collection[str]):
    """ValueError for the first of the flags `names` that is given and below 1."""
    for name in names:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} is {value}: it must be at least 1.")


def read_recipe(path: str | Path, flags: Collection[str], left_out: Collection[str] = ()) -> list[str]:
    """A YAML file of flags as command-line words, so that both ways share one check of types."""
    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(f"The recipe {path} cannot be read: {reason}.") from None
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path} must hold lines of the form 'flag: value'.")
    words = []
    for key, value in recipe.items():
        if key not in flags:
            raise ValueError(f"The recipe {path} has an unknown key {key!r}{nearest(str(key), flags)}")
        if value is not None and key not in left_out:
            words += [f"--{key}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words
