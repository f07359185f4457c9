"""Which architectures become a HOPE, and what flags change in it."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Architecture:
    """One architecture of transformers.

    Attributes:
        same: fields beyond `SAME` that HOPE has under the same name.
        fixed: HOPE's fields with the values that the architecture always has.
        window: fields beyond these that say which layers see a window.
    """

    same: tuple[str, ...] = ()
    fixed: Mapping[str, bool] = field(default_factory=dict)
    window: tuple[str, ...] = ()


_QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
ARCHITECTURES = {
    "llama": Architecture(same=("attention_bias", "mlp_bias")),
    "mistral": Architecture(window=("sliding_window",)),
    "qwen2": Architecture(fixed={"attention_bias": True, "attention_out_bias": False}, window=_QWEN_WINDOW),
    "qwen3": Architecture(same=("attention_bias",), fixed={"use_qk_norm": True}, window=_QWEN_WINDOW),
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
