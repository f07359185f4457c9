"""`--config_overrides`: fields of a new model's config."""

import json
import re

import yaml

from .flags import LARGEST_VOCABULARY
from .process import one_line
from .recipe import load_yaml


def parse_overrides(text: str | None) -> dict:
    """`a=b,c=[1,2]` or a JSON object as a dict; values read as YAML scalars and lists."""
    if not text:
        return {}
    try:
        if text.lstrip().startswith("{"):
            return json.loads(text, object_pairs_hook=_overrides)
        pairs = []
        # Commas inside brackets belong to a list's value.
        for pair in re.split(r",(?![^\[]*\])", text):
            name, equals, value = pair.partition("=")
            if not name or not equals:
                raise ValueError("write name=value,name=value")
            pairs.append((name.strip(), _scalar(value)))
        return _overrides(pairs)
    # RecursionError: thousands of nested brackets.
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ValueError(f"--config_overrides {text!r} cannot be read: {one_line(error)}.") from None


def named_vocabulary(text: str | None) -> int | None:
    """The `vocab_size` of `--config_overrides`; ValueError unless it is absent or a whole number of entries."""
    size = parse_overrides(text).get("vocab_size")
    if size is not None and (type(size) is not int or not 1 <= size <= LARGEST_VOCABULARY):
        raise ValueError(
            f"--config_overrides: vocab_size is {size!r}, give a whole number from 1 to {LARGEST_VOCABULARY:,}."
        )
    return size


def _overrides(pairs: list[tuple[str, object]]) -> dict:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name comes twice")
    for name, value in pairs:
        if isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"{name} has more than 64 bits")
    return values


def _scalar(text: str):
    value = load_yaml(text)
    try:
        # YAML 1.1 reads 1e-3 as a string.
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value
