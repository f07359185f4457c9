"""Recipes: YAML files of flags, read as the words of a command line so that both ways share one check."""

import json
from collections.abc import Collection
from pathlib import Path

import yaml

from .parser import nearest


def split_recipe(
    argv: list[str], flags: Collection[str], left_out: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """The words of the recipe that comes first (none if there is none), and the words after it."""
    return ([], argv) if not argv or argv[0].startswith("-") else (read_recipe(argv[0], flags, left_out), argv[1:])


def read_recipe(path: str | Path, flags: Collection[str], left_out: Collection[str] = ()) -> list[str]:
    """A YAML file of flags as command-line words; ValueError that names the file where it cannot be read."""
    recipe = read_yaml(path, f"The recipe {path}")
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path} must hold lines of the form 'flag: value'.")
    words = []
    for key, value in recipe.items():
        if key not in flags:
            raise ValueError(f"The recipe {path} has an unknown key {key!r}{nearest(str(key), flags)}")
        if value is not None and key not in left_out:
            words += [f"--{key}", _word(path, key, value)]
    return words


def read_yaml(path: str | Path, named: str) -> object:
    """The value of a YAML file as `load_yaml` has it; ValueError that begins with `named` where it cannot be read."""
    try:
        return load_yaml(Path(path).read_text(encoding="utf-8"))
    # RecursionError: thousands of nested brackets. ValueError: not UTF-8, or a date that does not exist.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise ValueError(f"{named} cannot be read: {reason}.") from None


def load_yaml(text: str) -> object:
    """The value of a YAML text, which may have no repeated keys and no aliases.

    Raises yaml.YAMLError, ValueError or RecursionError.
    """
    return yaml.load(text, Loader=PlainLoader)


class PlainLoader(yaml.SafeLoader):
    """YAML without repeated keys, of which the last would be kept silently, and without aliases.

    A few aliases of aliases fill the memory. The loader in C ends the process on thousands of nested brackets.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, f"write *{event.anchor} out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} comes twice", key.start_mark
                )
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def _word(path: str | Path, key: str, value: object) -> str:
    try:
        return json.dumps(value) if isinstance(value, dict) else str(value)
    except TypeError as error:
        raise ValueError(f"The recipe {path} has a value of {key} that is not JSON: {error}.") from None
