"""Which architectures and which of their fields HOPE expresses, and the configuration that does."""

from dataclasses import dataclass, fields

from transformers import PreTrainedConfig

from hope_hf import HopeConfig
from hope_hf.common.process import MISTAKES, one_line

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


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers.

    Attributes:
        same: fields beyond `SAME` that HOPE has under the same name.
        fixed: values of HOPE's fields that the architecture always has.
        window: fields beyond these that say which layers see a window.
    """

    same: tuple[str, ...] = ()
    fixed: tuple[tuple[str, object], ...] = ()
    window: tuple[str, ...] = ()


_QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
ARCHITECTURES = {
    "llama": Architecture(same=("attention_bias", "mlp_bias")),
    "mistral": Architecture(window=("sliding_window",)),
    "qwen2": Architecture(fixed=(("attention_bias", True), ("attention_out_bias", False)), window=_QWEN_WINDOW),
    "qwen3": Architecture(same=("attention_bias",), fixed=(("use_qk_norm", True),), window=_QWEN_WINDOW),
}
WORKS = f"what works is {', '.join(ARCHITECTURES)}"


@dataclass(frozen=True)
class Changes:
    """What the converted model has otherwise than its source.

    Attributes:
        levels: tokens between two steps of each parallel level, fast to slow; empty: one level.
        memory_layers: layers whose attention HOPE's memories replace.
        sliding_window: tokens that attention sees, with the first `attention_sinks`; `None`: as in the source.
    """

    levels: tuple[int, ...] = ()
    memory_layers: tuple[int, ...] = ()
    sliding_window: int | None = None
    attention_sinks: int = 0


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
    layers = range(config.num_hidden_layers)
    for layer in changes.memory_layers:
        if layer not in layers:
            raise ValueError(
                f"--memory_layers has {layer}, and the layers of {named} are 0 to {layers[-1]}: name some of these."
            )
    kinds = _kinds(config, architecture)
    window, sinks = config.sliding_window if "window_attention" in kinds else None, 0
    if changes.sliding_window is not None:
        if window is not None:
            raise ValueError(f"{named} has a sliding_window of {window} already: leave --sliding_window out.")
        kinds, window, sinks = ["window_attention"] * len(kinds), changes.sliding_window, changes.attention_sinks
    kinds = ["hope_memory" if layer in changes.memory_layers else kind for layer, kind in enumerate(kinds)]
    if "window_attention" in kinds:
        windows = {"sliding_window": window, "attention_sinks": sinks}
    else:
        windows = {}
    values = {name: getattr(config, name) for name in (*SAME, *architecture.same)} | dict(architecture.fixed) | windows
    heads = config.num_attention_heads
    values |= {
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "layer_types": kinds,
        "level_intermediate_sizes": _cut(config.intermediate_size, max(1, len(changes.levels))),
        "level_periods": list(changes.levels) or [512],
        "level_variant": "independent" if len(changes.levels) > 1 else "sequential",
        "level_learning": {"periods": list(changes.levels)} if changes.levels else {},
        "dtype": config.dtype,
    }
    try:
        return HopeConfig(**values)
    except MISTAKES as error:
        raise ValueError(f"{named} cannot be expressed as a HOPE: {one_line(error)}") from error


def _cut(units: int, levels: int) -> list[int]:
    """The hidden units of each level, as even as possible."""
    if levels > units:
        raise ValueError(f"--levels has {levels} periods for {units} hidden units: give fewer.")
    return [units // levels + (level < units % levels) for level in range(levels)]


def _check_fields(config: PreTrainedConfig, architecture: Architecture, named: str) -> None:
    """ValueError for a field that is neither read nor at the default of its architecture."""
    known = {*SAME, *READ, *HARMLESS, *architecture.same, *architecture.window}
    default = type(config)()
    declared = {field.name for field in fields(config)} - known
    odd = {name: getattr(config, name) for name in declared if getattr(config, name) != getattr(default, name)}
    # fields of no class
    values = config.to_dict()
    odd |= {name: "..." for name in ("quantization_config", "per_layer_config") if values.get(name)}
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        odd["auto_map"] = "..."
    if odd:
        given = ", ".join(f"{name}={value!r}" if value != "..." else name for name, value in sorted(odd.items()))
        fields_known = ", ".join(sorted({*SAME, *READ, *architecture.same, *architecture.window}))
        raise ValueError(
            f"{named} has {given}, which HOPE cannot express: of a {config.model_type} these fields work: "
            f"{fields_known}."
        )


def _kinds(config: PreTrainedConfig, architecture: Architecture) -> list[str]:
    """The kind of attention of each layer."""
    ours = {"full_attention": "full_attention", "sliding_attention": "window_attention"}
    # Llamas of other programs have a sliding_window, too, which transformers does not read
    if not architecture.window or config.sliding_window is None:
        return ["full_attention"] * config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [ours[kind] for kind in kinds]
