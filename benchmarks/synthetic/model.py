"""The small models that are trained from scratch."""

import json
from dataclasses import replace

import torch
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hope_hf import PRESETS
from hope_hf.common.flags import ModelArguments
from hope_hf.common.models import build_config, build_model
from hope_hf.common.overrides import parse_overrides

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


def small_model(
    architecture: ModelArguments, vocab_size: int, seed: int, dtype: torch.dtype = torch.float32
) -> PreTrainedModel:
    """A new model on the CPU, its weights drawn from `seed`.

    It is `model_type` (default: hope) with two layers of width 64, or exactly `config_name`; `config_overrides` are
    applied last. Raises ValueError for names and values that do not exist.
    """
    overrides = sizes(architecture) | parse_overrides(architecture.config_overrides)
    named = replace(architecture, config_overrides=json.dumps(overrides))
    config = build_config(named, None, vocab_size, PRESETS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build_model(named, config, dtype)


def sizes(architecture: ModelArguments) -> dict:
    """Config fields that make the architecture small, under its own names; none if `config_name` sets the size."""
    model_type = architecture.model_type or "hope"
    if architecture.config_name or model_type not in CONFIG_MAPPING:
        return {}
    if model_type in OWN_SIZES:
        return OWN_SIZES[model_type]
    config_class = CONFIG_MAPPING[model_type]
    fields = config_class().to_dict()
    chosen = {}
    for name, value in SIZES.items():
        own_name = config_class.attribute_map.get(name, name)
        if own_name in fields:
            chosen[own_name] = value
    return chosen


def describe(architecture: ModelArguments) -> str:
    """The model's name in a table: its architecture, and in brackets the changed fields, or their number."""
    name = architecture.config_name or architecture.model_type or "hope"
    changed = parse_overrides(architecture.config_overrides)
    words = ", ".join(f"{field}={value}" for field, value in changed.items())
    if len(words) > _WIDEST_CELL:
        words = f"{len(changed)} fields changed"
    return f"{name} ({words})" if words else name
