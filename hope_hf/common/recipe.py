"""Recipes: YAML files of flags, read as the words of a command line so that both ways share one check."""

import json
import os
import re
import reprlib
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import partial
from pathlib import Path

import yaml

from .files import at_home, read_small
from .flags import OF_ONE_TEXT, TEXT_SOURCES
from .packaged import RECIPES, find_file, packaged_files
from .parser import nearest
from .process import one_line

MODELS = ("model_name_or_path", "model_type", "config_name")
# The length of a run; the first overrides the second.
LENGTH = ("max_train_steps", "num_train_epochs")
# Flags whose value may be a mapping.
_OBJECTS = ("config_overrides", "level_optimizers", "lr_scheduler_kwargs")
# Flags that may have a list of values.
_LISTS = ("train_file", "validation_file")
# Ends of the names of texts, which are no recipes.
_TEXTS = (".txt", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow", ".gz", ".zst", ".bz2", ".lz4")
# Bytes: PyYAML reads a megabyte in seconds.
_LARGEST = 1 << 20


def split_recipe(
    argv: list[str], flags: Collection[str], left_out: Collection[str] = ()
) -> tuple[list[str], list[str]]:
    """The words of the recipe at the beginning (none if there is none), and the words after it."""
    if not argv or argv[0].startswith("-"):
        return [], argv
    return read_recipe(at_home(argv[0]), flags, left_out), argv[1:]


def is_recipe(word: str) -> bool:
    """Whether the first word of a command names a recipe, or a file that is taken for one by mistake."""
    names_a_file = word.lower().endswith((".yaml", ".yml", *_TEXTS))
    return names_a_file or os.path.isfile(find_file(word, RECIPES))


def read_recipe(path: str | Path, flags: Collection[str], left_out: Collection[str] = ()) -> list[str]:
    """A YAML file of flags, the user's or one of the package, as command-line words.

    Raises ValueError that names the file if it cannot be read.
    """
    file = find_file(path, RECIPES)
    if Path(file).suffix.lower() in _TEXTS:
        raise ValueError(f"The recipe {path} is no .yaml file: name a text with --train_file.")
    if not os.path.exists(file):
        names = [Path(name).stem for name in packaged_files(RECIPES)]
        close = get_close_matches(Path(path).stem, names, 1)
        if close:
            raise ValueError(f"The recipe {path} does not exist; did you mean {close[0]}.yaml?")
    recipe = read_yaml(file, f"The recipe {path}", partial(load_yaml, loader=_FlagLoader))
    if not isinstance(recipe, dict):
        raise ValueError(f"The recipe {path} must hold lines of the form 'flag: value'.")
    words = []
    for key, value in recipe.items():
        if key not in flags:
            raise ValueError(f"The recipe {path} has an unknown key {key!r}{nearest(str(key), flags)}")
        values = value if key in _LISTS and isinstance(value, list) and value else [value]
        for single in values:
            # One word, so that a value that looks like a flag is not taken for one.
            word = f"--{key}={_word(path, key, single)}"
            if key not in left_out:
                words.append(word)
    return words


def replaced(recipe: list[str], named: Collection[str]) -> list[str]:
    """The words of a recipe without those that the flags `named` on the command line replace as a group.

    Another text replaces all flags of the recipe's text, another model those of its model, steps its epochs (and
    epochs its steps). Shards bring a tokenizer.
    """
    # Two flags of several values would add up.
    dropped = set(_LISTS) & set(named)
    groups = ((TEXT_SOURCES, OF_ONE_TEXT), (MODELS, {*MODELS, "config_overrides"}), (LENGTH, LENGTH))
    for sources, group in groups:
        if not named.isdisjoint(sources):
            dropped |= set(group)
    if "train_shards" in named:
        dropped.add("tokenizer_name")
    return without(recipe, dropped)


def without(recipe: list[str], flags: Collection[str]) -> list[str]:
    """The words of a recipe without those of some flags."""
    return [word for word in recipe if word.split("=")[0].removeprefix("--") not in flags]


def read_yaml(path: str | Path, named: str, parse: Callable[[str], object] | None = None) -> object:
    """What `parse` (default: `load_yaml`) makes of a YAML file's text.

    Raises ValueError that begins with `named` if the file cannot be read.
    """
    try:
        return (parse or load_yaml)(read_small(path, _LARGEST))
    # RecursionError: thousands of nested brackets. ValueError: not UTF-8, or a date that does not exist.
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{named} cannot be read: {reason}.") from None


def yaml_fields(path: str | Path, named: str) -> dict[str, str | list[str] | None] | None:
    """The fields of a YAML file whose tags may be unknown: strings, lists of strings, `None` for other values.

    Returns `None` if the file is not a mapping. Nothing is constructed. Raises ValueError that begins with `named` for
    a file that cannot be read.
    """
    # PyYAML's loader in C, which lm-eval uses, crashes on thousands of nested brackets.
    node = read_yaml(path, named, partial(yaml.compose, Loader=yaml.SafeLoader))
    if not isinstance(node, yaml.MappingNode):
        return None
    return {key.value: _plain_value(value) for key, value in node.value if isinstance(key, yaml.ScalarNode)}


def _plain_value(node: yaml.Node) -> str | list[str] | None:
    if isinstance(node, yaml.SequenceNode):
        return [child.value for child in node.value if isinstance(child, yaml.ScalarNode)]
    return node.value if node.tag == "tag:yaml.org,2002:str" else None


def load_yaml(text: str, loader: type[yaml.SafeLoader] | None = None) -> object:
    """The value of a YAML text, which may have no repeated keys, no aliases and no merged mappings.

    Raises yaml.YAMLError, ValueError or RecursionError.
    """
    try:
        return yaml.load(text, Loader=loader or PlainLoader)
    # PyYAML raises LookupError for `!!int ''` and `!!bool x`.
    except LookupError as error:
        raise yaml.YAMLError(f"a value does not fit its tag ({error})") from None


class PlainLoader(yaml.SafeLoader):
    """YAML without repeated keys, of which only the last would count, and without aliases.

    A few aliases of aliases can fill the memory. PyYAML's loader in C crashes on thousands of nested brackets.
    """

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(None, None, f"write *{event.anchor} out", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node, deep=False):
        keys = set()
        for key, _ in node.value:
            mistake = None
            if not isinstance(key, yaml.ScalarNode):
                mistake = "a key is a list or a mapping"
            elif key.tag == "tag:yaml.org,2002:merge":
                mistake = "write what << merges out"
            elif (key.tag, key.value) in keys:
                mistake = f"the key {key.value!r} comes twice"
            if mistake:
                raise yaml.constructor.ConstructorError(None, None, mistake, key.start_mark)
            keys.add((key.tag, key.value))
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node):
        _require_decimal(node)
        return super().construct_yaml_int(node)

    def construct_yaml_float(self, node):
        _require_decimal(node)
        return super().construct_yaml_float(node)


def _require_decimal(node: yaml.ScalarNode) -> None:
    """ConstructorError for numbers that YAML 1.1 reads in other ways than people: 010 is 8, and 1:30 is 90."""
    if ":" in node.value or re.fullmatch(r"[-+]?0[0-9_]+", node.value):
        raise yaml.constructor.ConstructorError(
            None, None, f"write {node.value} as a decimal number, or in quotes", node.start_mark
        )


PlainLoader.add_constructor("tag:yaml.org,2002:int", PlainLoader.construct_yaml_int)
PlainLoader.add_constructor("tag:yaml.org,2002:float", PlainLoader.construct_yaml_float)


class _FlagLoader(PlainLoader):
    """Values of flags as they are written: YAML 1.1 makes `no` False, `2026_11_28` a number and `1:30` 90."""

    def construct_document(self, node):
        if isinstance(node, yaml.MappingNode):
            for _, value in node.value:
                for part in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    if isinstance(part, yaml.ScalarNode) and part.tag in _TYPED and _is_a_flags_word(part.value):
                        part.tag = "tag:yaml.org,2002:str"
        return super().construct_document(node)


def _is_a_flags_word(word: str) -> bool:
    """Whether flags read the word as it is; of YAML's own forms `on`, `off`, `.inf` and `0x10` values are made."""
    return re.fullmatch(r"on|off|[-+]?\.(inf|nan)|[-+]?0[xbo].*", word, re.IGNORECASE) is None


_TYPED = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "timestamp")}


def _word(path: str | Path, key: str, value: object) -> str:
    if isinstance(value, dict) and key in _OBJECTS:
        try:
            return json.dumps(value)
        except TypeError as error:
            raise ValueError(f"The recipe {path} has a value of {key} that is not JSON: {error}.") from None
    word = str(value)
    # a bool is an int
    if not isinstance(value, str | int | float) or not word.strip() or word.startswith("--"):
        raise ValueError(f"The recipe {path} has {key}: {reprlib.repr(value)}, give it one value or leave it out.")
    return word
