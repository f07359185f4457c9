"""Decides for every parameter its update rule, its period and its weight decay; the only place that does."""

import json
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from .level_clock import LevelClock
from .rules import RULES

# Slow levels average more gradients and step less often; a larger rate, up to this factor, makes up for it.
LR_FACTOR_MAX = 4.0
# Settings of a level's optimizer that differ from the run's.
FLAG = "--level_optimizers"
# Sorts before the fastest level, 0.
NO_LEVEL = -1
# The same bound as for the flags of the run: products of rates and decays stay within float32.
_LARGEST = 10**9
_MOST_BYTES = 1 << 20


def build_optimizer(
    model: nn.Module,
    name: str,
    learning_rate: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    tokens_per_step: int,
    level_optimizers: str | dict | None = None,
    vector_learning_rate: float | None = None,
) -> LevelClock:
    """One optimizer for all of a causal LM's trainable parameters. Four questions decide a parameter's group.

    - Which level? That of the module around it that has the attributes `level` and `period` (in tokens). A parameter
      without a level steps every time.
    - Which rule? That of the level's entry, or else `name`. A rule that needs matrices (Muon) gets matrices and stacks
      of them; AdamW updates embeddings, the output embeddings, convolutions, initial memories and what does not decay.
    - Weight decay? Not for parameters of one axis, biases, norms, initial memories (`is_initial_state`), and those
      that a module lists in `_no_weight_decay`.
    - Which rate? `vector_learning_rate`, where it is given, for vectors: parameters of one axis, biases, norms and
      (though they decay) the kernel weights of depthwise convolutions. A wider model needs a smaller rate for its
      matrices, but not for its vectors (Yang et al. 2022, arXiv 2203.03466, table 3).

    A level steps every `max(1, round(period / tokens_per_step))` calls. Tied parameters appear once.

    Args:
        model: as `from_config` or `from_pretrained` returns it, not wrapped.
        name: the rule, a key of `RULES`.
        learning_rate: the peak learning rate.
        vector_learning_rate: the peak learning rate of vectors; `None`: `learning_rate`.
        betas, eps: those of AdamW.
        tokens_per_step: over all processes and accumulated micro-batches.
        level_optimizers: see `parse_level_optimizers`; a level without an entry takes the run's settings, and as
            learning-rate factor the square root of its period over the fastest level's, at most 4.

    Raises:
        ValueError: unknown optimizer, or a wrong entry in `level_optimizers`.
    """
    if name not in RULES:
        raise ValueError(f"--optimizer is {name!r}: use {' or '.join(RULES)}.")
    periods, level_of = _levels(model)
    options = defaultdict(LevelOptions, parse_level_optimizers(level_optimizers))
    _check_levels(options, periods)
    periods[NO_LEVEL] = 0
    kinds = _Kinds(model)
    members: dict[_Group, list[nn.Parameter]] = defaultdict(list)
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            level = level_of.get(parameter, NO_LEVEL)
            rule = options[level].optimizer or name
            is_vector = vector_learning_rate is not None and kinds.is_vector(parameter_name, parameter)
            group = _Group(
                level=level,
                is_vector=is_vector,
                rule=kinds.rule(parameter_name, parameter, rule),
                decays=kinds.decays(parameter_name, parameter),
            )
            members[group].append(parameter)
    groups = []
    for group in sorted(members):
        level_options = options[group.level]
        period = periods[group.level]
        rate = vector_learning_rate if group.is_vector else learning_rate
        decay = weight_decay if level_options.weight_decay is None else level_options.weight_decay
        clock = {
            "params": members[group],
            "optimizer": group.rule,
            "level": None if group.level == NO_LEVEL else group.level,
            "period_tokens": period,
            "period_steps": period_steps(period, tokens_per_step),
            "lr": rate * _rate_factor(group.level, periods, level_options, tokens_per_step),
            "weight_decay": decay if group.decays else 0.0,
        }
        rule = RULES[group.rule]
        groups.append(clock | rule.settings(level_options.betas or betas, eps))
    return LevelClock(groups)


class _Group(NamedTuple):
    """What the parameters of a group have in common, in the order of the groups.

    Matrices come before vectors: the first group's rate is the one that is logged.
    """

    level: int
    is_vector: bool
    rule: str
    decays: bool


def _check_levels(options: dict[int, "LevelOptions"], periods: dict[int, int]) -> None:
    """ValueError for options of a level that the model has not."""
    for level in options:
        if not periods:
            raise ValueError(f"{FLAG} names level {level}, but this model has no levels: leave the flag out.")
        if level not in periods:
            raise ValueError(f"{FLAG} names level {level}, but this model has levels 0 to {max(periods)}.")


def _rate_factor(level: int, periods: dict[int, int], options: "LevelOptions", tokens_per_step: int) -> float:
    """By what the learning rate of a level is multiplied."""
    if level == NO_LEVEL:
        return 1.0
    if options.lr_factor is not None:
        return options.lr_factor
    # A period below one step's tokens lasts one step: it averages as many gradients as the fastest level.
    length = max(periods[level], tokens_per_step)
    length_of_fastest = max(periods[0], tokens_per_step)
    return min(LR_FACTOR_MAX, (length / length_of_fastest) ** 0.5)


def rules_of(model: nn.Module, name: str) -> dict[str, str]:
    """The key in `RULES` of the rule that updates each parameter with `--optimizer NAME`, by the parameter's name.

    The model may be on the meta device; tied parameters appear once.
    """
    kinds = _Kinds(model)
    rules = {}
    for parameter_name, parameter in model.named_parameters():
        rules[parameter_name] = kinds.rule(parameter_name, parameter, name)
    return rules


def period_steps(period: int, tokens_per_step: int) -> int:
    """Optimizer steps between two updates of a level whose period is given in tokens; 1 for a period of 0."""
    return max(1, round(period / tokens_per_step))


def periods_of(model: nn.Module) -> dict[str, int]:
    """Tokens between two updates of each parameter, by its name; 0 for a parameter of no level."""
    periods, level_of = _levels(model)
    of_parameters = {}
    for name, parameter in model.named_parameters():
        of_parameters[name] = periods.get(level_of.get(parameter), 0)
    return of_parameters


def _levels(model: nn.Module) -> tuple[dict[int, int], dict[nn.Parameter, int]]:
    """Period in tokens of every level, and the level of every parameter that has one."""
    periods: dict[int, int] = {}
    level_of: dict[nn.Parameter, int] = {}
    for module in model.modules():
        if hasattr(module, "level") and hasattr(module, "period"):
            period = periods.setdefault(module.level, module.period)
            assert period == module.period, "a level has one period"
            level_of |= dict.fromkeys(module.parameters(), module.level)
    return periods, level_of


class _Kinds:
    """The kind of each parameter, from the modules that own it (a tied parameter has several)."""

    def __init__(self, model: nn.Module):
        self.exempt: set[nn.Parameter] = set()
        self.not_matrix: set[nn.Parameter] = set()
        for module in model.modules():
            parameters = dict(module.named_parameters(remove_duplicate=False))
            if getattr(module, "is_initial_state", False):
                self.exempt.update(parameters.values())
            # A listed parameter of an option that is switched off does not exist.
            listed = parameters.keys() & getattr(module, "_no_weight_decay", ())
            self.exempt.update(map(parameters.get, listed))
            if isinstance(module, nn.Embedding | nn.modules.conv._ConvNd):
                self.not_matrix.update(module.parameters(recurse=False))
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):
            if module is not None:
                self.not_matrix.update(module.parameters())

    def decays(self, name: str, parameter: nn.Parameter) -> bool:
        return not _is_flat(name, parameter) and parameter not in self.exempt

    @staticmethod
    def is_vector(name: str, parameter: nn.Parameter) -> bool:
        is_depthwise_kernel = parameter.ndim == 3 and parameter.shape[1] == 1
        return _is_flat(name, parameter) or is_depthwise_kernel

    def rule(self, name: str, parameter: nn.Parameter, rule: str) -> str:
        """`rule`, or AdamW if that rule needs matrices and the parameter is not one."""
        if not RULES[rule].needs_matrices:
            return rule
        # A depthwise convolution [channels, 1, width] outside a convolution module is a stack of vectors.
        is_stack_of_vectors = min(parameter.shape[-2:], default=1) == 1
        if is_stack_of_vectors or parameter in self.not_matrix or not self.decays(name, parameter):
            return "adamw"
        return rule


def _is_flat(name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter has one axis, or is a norm or a bias (which has a row for each head)."""
    # Its own name and that of its module.
    last_names = name.lower().split(".")[-2:]
    is_norm = "norm" in " ".join(last_names)
    is_bias = last_names[-1] == "bias" or last_names[-1].endswith("_bias")
    return parameter.ndim < 2 or is_norm or is_bias


@dataclass(frozen=True)
class LevelOptions:
    """A level's own settings; None: the run's.

    Attributes:
        optimizer: a key of `RULES`.
        lr_factor: the level's learning rate divided by the learning rate of the run.
        betas: AdamW's two decay rates.
        weight_decay: for the level's matrices.
    """

    optimizer: str | None = None
    lr_factor: float | None = None
    betas: tuple[float, float] | None = None
    weight_decay: float | None = None


def parse_level_optimizers(source: str | dict | None) -> dict[int, LevelOptions]:
    """Read `--level_optimizers`: JSON text, the path of a JSON file, or the mapping itself.

    Example: `{"2": {"optimizer": "muon", "lr_factor": 2.0, "betas": [0.9, 0.95], "weight_decay": 0.0}}`.

    Raises:
        ValueError: the source is not readable or not JSON, or a key or value is not allowed.
    """
    if source is None:
        return {}
    if isinstance(source, str):
        source = _read_json(source)
    if not isinstance(source, dict):
        raise ValueError(f'{FLAG} is a {type(source).__name__}: give an object keyed by level, {{"0": {{...}}}}.')
    options = {}
    for key, entry in source.items():
        level = str(key)
        if not level.isdecimal() or len(level) > 9:
            raise ValueError(f'{FLAG} has the level "{level}": give its number, 0 for the fastest.')
        if not isinstance(entry, dict):
            raise ValueError(f'{FLAG} has {json.dumps(entry)} for level {level}: give an object, {{"lr_factor": 2}}.')
        if int(level) in options:
            raise ValueError(f"{FLAG} names level {level} twice: leave one of the two out.")
        options[int(level)] = _level_options(level, entry)
    return options


def _read_json(source: str) -> object:
    """The value of JSON text, or of the file of that path."""
    is_text = source.lstrip().startswith(("{", "["))
    text = source if is_text else _read_file(source)
    try:
        return json.loads(text)
    # ValueError: not JSON, or a number of thousands of digits; RecursionError: thousands of nested brackets.
    except (ValueError, RecursionError) as error:
        place = FLAG if is_text else f"{FLAG} {source}"
        raise ValueError(f"{place} is not JSON ({error}): fix the text there.") from error


def _read_file(path: str) -> str:
    file = Path(path)
    try:
        size = file.stat().st_size
        # Opening a pipe would block for ever.
        if not file.is_file() or size > _MOST_BYTES:
            raise OSError(f"it is no file of at most {_MOST_BYTES:,} bytes")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{FLAG} {path} cannot be read ({error}): give JSON text or the path of a JSON file."
        ) from error


def _level_options(level: str, entry: dict) -> LevelOptions:
    for key, value in entry.items():
        if key not in _ALLOWED:
            raise ValueError(f'{FLAG} has the unknown key "{key}" for level {level}: use {", ".join(_ALLOWED)}.')
        is_allowed, allowed = _ALLOWED[key]
        if not is_allowed(value):
            raise ValueError(f"{FLAG} has {key} {json.dumps(value)} for level {level}: give {allowed}.")
    options = LevelOptions(**entry)
    if options.betas is None:
        return options
    return replace(options, betas=tuple(options.betas))


def _is_rule(value: object) -> bool:
    return isinstance(value, str) and value in RULES


def _is_factor(value: object) -> bool:
    return _is_decay(value) and value > 0


def _is_decay(value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= _LARGEST


def _are_betas(value: object) -> bool:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    return is_pair and all(map(_is_decay, value)) and max(value) < 1


# A check of each key's value, and the description of an allowed value.
_ALLOWED = {
    "optimizer": (_is_rule, " or ".join(RULES)),
    "lr_factor": (_is_factor, f"a number above 0, at most {_LARGEST:,}"),
    "betas": (_are_betas, "two numbers from 0 to below 1"),
    "weight_decay": (_is_decay, f"a number from 0 to {_LARGEST:,}"),
}
