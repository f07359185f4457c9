"""The small models that the synthetic suite trains from scratch."""

import json
import warnings
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hope_hf import PRESETS
from hope_hf.common.models import build_config, build_model, parse_overrides

from ..flags import Arguments

_WIDEST_CELL = 40
# Width 64 and 2 layers for every architecture; only fields that its config has are set.
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 176,
}
OWN_SIZES = {
    # Four heads, and one chunk for words of up to 128 symbols, so that a symbol's key and value do not depend on its
    # place; the levels' sizes follow.
    "hope": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "memory_chunk_size": 128,
        "level_periods": None,
        "level_intermediate_sizes": None,
    },
    # A state as large as that of HOPE's content memory; the chunk only sets the speed.
    "mamba2": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 32,
        "n_groups": 1,
        "state_size": 32,
        "chunk_size": 32,
    },
}


def small_model(args: Arguments, vocab_size: int, seed: int) -> PreTrainedModel:
    """A new model on the CPU, its weights drawn from `seed`.

    The architecture is `--model_type` (default: hope) with two layers of width 64, or exactly `--config_name`;
    `--config_overrides` is applied last. `--model_name_or_path` is ignored with a warning. Raises ValueError for names
    and values that do not exist.
    """
    if args.model_name_or_path:
        warnings.warn("The synthetic suite trains new models: --model_name_or_path is not used.", stacklevel=2)
    overrides = json.dumps({**sizes(args), **parse_overrides(args.config_overrides)})
    named = replace(args, model_name_or_path=None, config_overrides=overrides)
    config = build_config(named, None, vocab_size, PRESETS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(named, config, getattr(torch, args.dtype))


def sizes(args: Arguments) -> dict:
    """Config fields that make the architecture small, under its own names; none if `--config_name` sets the size."""
    model_type = args.model_type or "hope"
    if args.config_name or model_type not in CONFIG_MAPPING:
        return {}
    if model_type in OWN_SIZES:
        return OWN_SIZES[model_type]
    config_class = CONFIG_MAPPING[model_type]
    given = {config_class.attribute_map.get(name, name): value for name, value in SIZES.items()}
    known = config_class().to_dict()
    return {name: value for name, value in given.items() if name in known}


def describe(args: Arguments) -> str:
    """The model's name in the report: its architecture, and in brackets the changed fields, or their number."""
    name = args.config_name or args.model_type or "hope"
    changed = parse_overrides(args.config_overrides)
    words = ", ".join(f"{field}={value}" for field, value in changed.items())
    if len(words) > _WIDEST_CELL:
        words = f"{len(changed)} fields changed"
    return f"{name} ({words})" if words else name
