"""`--level_optimizers`: settings of a level's optimizer that differ from the run's."""

import json
import stat
from dataclasses import dataclass
from pathlib import Path

from .rules import RULES

FLAG = "--level_optimizers"
# As for the flags of the run: products of rates and decays stay within float32.
_LARGEST = 10**9
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class LevelOptions:
    """A level's own settings; None: the run's.

    Attributes:
        optimizer: a key of `RULES`.
        lr_factor: the level's learning rate divided by the run's.
        betas: AdamW's two decay rates.
        weight_decay: of the level's matrices.
    """

    optimizer: str | None = None
    lr_factor: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None


def parse_level_optimizers(source: str | dict | None) -> dict[int, LevelOptions]:
    """Read `--level_optimizers`: JSON text, the path of a JSON file, or the mapping itself.

    Example: `{"2": {"optimizer": "muon", "lr_factor": 2.0, "betas": [0.9, 0.95], "weight_decay": 0.0}}`.

    Raises:
        ValueError: not readable, not JSON, or a key or value that is not known.
    """
    if source is None:
        return {}
    if isinstance(source, str):
        source = _read_json(source)
    if not isinstance(source, dict):
        raise ValueError(f'{FLAG} is a {type(source).__name__}: give an object keyed by level, {{"0": {{...}}}}.')
    options = {}
    for level, entry in source.items():
        if not str(level).isdecimal() or len(str(level)) > 9:
            raise ValueError(f'{FLAG} has the level "{level}": give its number, 0 for the fastest.')
        if not isinstance(entry, dict):
            raise ValueError(f'{FLAG} has {json.dumps(entry)} for level {level}: give an object, {{"lr_factor": 2}}.')
        if int(level) in options:
            raise ValueError(f"{FLAG} names level {level} twice: leave one of the two out.")
        options[int(level)] = _level_options(level, entry)
    return options


def _read_json(source: str) -> object:
    text, what = source, FLAG
    if not source.lstrip().startswith(("{", "[")):
        what = f"{FLAG} {source}"
        try:
            # Opening a pipe would block for ever.
            status = Path(source).stat()
            if not stat.S_ISREG(status.st_mode) or status.st_size > _MOST_BYTES:
                raise OSError(f"it is no file of at most {_MOST_BYTES:,} bytes")
            text = Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{what} cannot be read ({error}): give JSON text or the path of a JSON file.") from error
    try:
        return json.loads(text)
    # ValueError: a number of thousands of digits, too; RecursionError: thousands of nested brackets.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not JSON ({error}): fix the text there.") from error


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _are_betas(value: object) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and all(_is_number(beta) and 0 <= beta < 1 for beta in value)


# What each key admits, and its description.
_ADMITTED = {
    "optimizer": (lambda value: isinstance(value, str) and value in RULES, " or ".join(RULES)),
    "lr_factor": (lambda value: _is_number(value) and value > 0, f"a number above 0, at most {_LARGEST:,}"),
    "betas": (_are_betas, "two numbers from 0 to below 1"),
    "weight_decay": (lambda value: _is_number(value) and value >= 0, f"a number from 0 to {_LARGEST:,}"),
}


def _level_options(level: str, entry: dict) -> LevelOptions:
    for key, value in entry.items():
        if key not in _ADMITTED:
            raise ValueError(f'{FLAG} has the unknown key "{key}" for level {level}: use {", ".join(_ADMITTED)}.')
        admits, wanted = _ADMITTED[key]
        if not admits(value):
            raise ValueError(f"{FLAG} has {key} {json.dumps(value)} for level {level}: give {wanted}.")
    return LevelOptions(**{key: tuple(value) if key == "betas" else value for key, value in entry.items()})
