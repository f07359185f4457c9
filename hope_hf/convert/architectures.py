"""Which architectures and which of their fields HOPE expresses, and the configuration that does."""

from dataclasses import fields

from transformers import PreTrainedConfig

from hope_hf import HopeConfig
from hope_hf.common.process import MISTAKES, one_line

from .changes import ARCHITECTURES, WORKS, Architecture, Changes

# Fields with the same name and the same meaning.
SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "rope_parameters", "attention_dropout",
    "initializer_range", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip
# Fields that `hope_config` reads otherwise.
READ = ("intermediate_size", "head_dim")
# Fields on which no logit depends. Llama's `pretraining_tp` once cut its matrices, which changed no product.
HARMLESS = (
    "transformers_version", "architectures", "output_hidden_states", "return_dict", "dtype", "id2label", "label2id",
    "problem_type", "pretraining_tp",
)  # fmt: skip


def hope_config(config: PreTrainedConfig, named: str, changes: Changes) -> HopeConfig:
    """The configuration of the HOPE with the logits of a model.

    Raises ValueError, one sentence that begins with `named`, for an architecture or a field that HOPE cannot express.
    """
    if config.model_type == "hope":
        raise ValueError(f"{named} is a HOPE already: load it with from_pretrained.")
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        raise ValueError(f"{named} is a {config.model_type}, which HOPE cannot express: {WORKS}.")
    _check_fields(config, architecture, named)
    values = {name: getattr(config, name) for name in (*SAME, *architecture.same)}
    values |= architecture.fixed
    values |= _mixers(config, architecture, named, changes)
    values |= _levels(config.intermediate_size, changes.levels)
    # not every configuration has a width of heads of its own
    values["head_dim"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values["dtype"] = config.dtype
    try:
        return HopeConfig(**values)
    except MISTAKES as error:
        raise ValueError(f"{named} cannot be expressed as a HOPE: {one_line(error)}") from error


def _mixers(config: PreTrainedConfig, architecture: Architecture, named: str, changes: Changes) -> dict:
    """The fields that say what mixes tokens in each layer."""
    last = config.num_hidden_layers - 1
    for layer in changes.memory_layers:
        if layer > last:
            raise ValueError(
                f"--memory_layers has {layer}, and the layers of {named} are 0 to {last}: name some of these."
            )
    kinds = _kinds(config, architecture)
    window, sinks = changes.sliding_window, changes.attention_sinks
    if "window_attention" in kinds:
        if window is not None:
            raise ValueError(
                f"{named} has a sliding_window of {config.sliding_window} already: leave --sliding_window out."
            )
        window, sinks = config.sliding_window, 0
    elif window is not None:
        kinds = ["window_attention"] * len(kinds)
    for layer in changes.memory_layers:
        kinds[layer] = "hope_memory"
    fields = {"layer_types": kinds}
    if "window_attention" in kinds:
        fields |= {"sliding_window": window, "attention_sinks": sinks}
    return fields


def _kinds(config: PreTrainedConfig, architecture: Architecture) -> list[str]:
    """The kind of attention of each layer of the source."""
    # Llamas of other programs have a sliding_window, too, which transformers does not read
    if not architecture.window or config.sliding_window is None:
        return ["full_attention"] * config.num_hidden_layers
    theirs = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return ["window_attention" if kind == "sliding_attention" else kind for kind in theirs]


def _levels(units: int, periods: tuple[int, ...]) -> dict:
    """The fields of the levels: one MLP, or its hidden units cut into parallel levels, as even as possible."""
    if len(periods) > units:
        raise ValueError(f"--levels has {len(periods)} periods for {units} hidden units: give fewer.")
    if not periods:
        return {
            "level_intermediate_sizes": [units],
            "level_periods": [512],
            "level_variant": "sequential",
            "level_learning": {},
        }
    even, left = divmod(units, len(periods))
    return {
        "level_intermediate_sizes": [even + 1] * left + [even] * (len(periods) - left),
        "level_periods": list(periods),
        "level_variant": "independent" if len(periods) > 1 else "sequential",
        "level_learning": {"periods": list(periods)},
    }


def _check_fields(config: PreTrainedConfig, architecture: Architecture, named: str) -> None:
    """ValueError for a field that is neither read nor at the default of its architecture."""
    read = {*SAME, *READ, *architecture.same, *architecture.window}
    default = type(config)()
    problems = []
    for name in (known.name for known in fields(config)):
        value = getattr(config, name)
        if name not in read and name not in HARMLESS and value != getattr(default, name):
            problems.append(f"{name}={value!r}")
    # fields of no class
    others = config.to_dict()
    problems += [name for name in ("quantization_config", "per_layer_config") if others.get(name)]
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        problems.append("auto_map")
    if problems:
        raise ValueError(
            f"{named} has {', '.join(sorted(problems))}, which HOPE cannot express: of a {config.model_type} these "
            f"fields work: {', '.join(sorted(read))}."
        )
