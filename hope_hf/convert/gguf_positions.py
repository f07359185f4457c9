"""Rotary positions of a GGUF file: what llama.cpp computes from its fields, and transformers' parameters for it."""

import math
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

# llama.cpp's defaults.
BASE = 10_000.0
BETA_FAST, BETA_SLOW = 32.0, 1.0
# Llama 3 slows down waves longer than its first context, and leaves those that fit it four times.
LOW, HIGH = 1.0, 4.0
# transformers computes the powers of the base in float32.
TOLERANCE = 5e-6


@dataclass(frozen=True)
class Positions:
    """Rotary positions.

    Attributes:
        parameters: `rope_parameters` of transformers.
        frequencies: radians a token of each pair of channels, [head_dim / 2], as llama.cpp has them.
        scale: of cosines and sines.
        named: the fields and the tensor that say so, for error messages.
    """

    parameters: dict
    frequencies: np.ndarray
    scale: float
    named: str

    def check(self, config: PreTrainedConfig, file: str) -> None:
        """ValueError, which begins with `file`, unless transformers computes these positions from `config`."""
        theirs = LlamaRotaryEmbedding(config)
        frequencies = theirs.inv_freq.double().numpy()
        same_scale = math.isclose(theirs.attention_scaling, self.scale, rel_tol=TOLERANCE)
        same_shape = frequencies.shape == self.frequencies.shape
        if not same_scale or not same_shape or not np.allclose(frequencies, self.frequencies, rtol=TOLERANCE, atol=0):
            raise ValueError(f"{file} has {self.named}, and positions that transformers and HOPE cannot express.")


def read_positions(fields: dict, factors: np.ndarray | None, head_dim: int, context: int) -> Positions:
    """The positions of a file.

    Args:
        fields: those below the name of the architecture, by name.
        factors: the tensor `rope_freqs.weight` [head_dim / 2], which divides the frequencies.
        head_dim: channels of a head, all of which are rotated.
        context: tokens with which it was trained.
    """
    base = fields.get("rope.freq_base", BASE)
    frequencies = base ** (-np.arange(0, head_dim, 2) / head_dim)
    scale = fields.get("rope.scaling.attn_factor", 1.0)
    named = [name for name in fields if name.startswith("rope.scal")]
    parameters = {"rope_type": "default", "rope_theta": base}
    # those of Llama 2 are ones
    if factors is not None and not np.allclose(factors, 1.0, rtol=TOLERANCE):
        named.append("rope_freqs.weight")
        parameters |= llama3_parameters(factors.astype(float), frequencies)
        frequencies = frequencies / factors
    factor = _factor(fields)
    kind = fields.get("rope.scaling.type", "linear")
    # what transformers has no kind for, such as both factors and a scaling, is refused by `check`
    if factor != 1.0 and kind == "linear":
        parameters |= {"rope_type": "linear", "factor": factor}
        frequencies = frequencies / factor
    elif factor != 1.0 and kind == "yarn":
        scale *= 1 + 0.1 * math.log(factor)
        parameters |= {
            "rope_type": "yarn",
            "factor": factor,
            "attention_factor": scale,
            "original_max_position_embeddings": fields.get("rope.scaling.original_context_length", context),
            "beta_fast": fields.get("rope.scaling.yarn_beta_fast", BETA_FAST),
            "beta_slow": fields.get("rope.scaling.yarn_beta_slow", BETA_SLOW),
        }
        frequencies = _yarn(frequencies, parameters)
    elif factor != 1.0:
        frequencies = np.full_like(frequencies, np.nan)
    return Positions(parameters, frequencies, scale, ", ".join(named))


def llama3_parameters(factors: np.ndarray, frequencies: np.ndarray) -> dict:
    """The parameters from which Llama 3's rule computes these factors, if there are any.

    Args:
        factors: by what each frequency is divided [head_dim / 2]: 1 for short waves, the largest for long ones, and
            between them a blend of the two.
        frequencies: before that, in radians a token [head_dim / 2].
    """
    largest = float(factors.max())
    is_short, is_long = np.isclose(factors, 1.0), np.isclose(factors, largest)
    if is_long.all():
        return {"rope_type": "linear", "factor": largest}
    waves = 2 * math.pi / frequencies
    is_blended = ~(is_short | is_long)
    if is_blended.any():
        context = _first_context(factors[is_blended], waves[is_blended], largest)
    else:
        # all lengths that part the two give the same frequencies
        context = 2 ** math.floor(math.log2(waves[is_long].min() * LOW))
    return {
        "rope_type": "llama3",
        "factor": largest,
        "low_freq_factor": LOW,
        "high_freq_factor": HIGH,
        "original_max_position_embeddings": context,
    }


def _first_context(factors: np.ndarray, waves: np.ndarray, largest: float) -> int:
    """The context, in tokens, that blends waves (of so many tokens) to these factors."""
    # 1 / factor is a mean of 1 / largest and 1, and this is the weight of 1
    weights = (1 / factors - 1 / largest) / (1 - 1 / largest)
    contexts = waves * (LOW + weights * (HIGH - LOW))
    return round(float(np.median(contexts)))


def _factor(fields: dict) -> float:
    if fields.get("rope.scaling.type") == "none":
        return 1.0
    return fields.get("rope.scaling.factor") or fields.get("rope.scale_linear") or 1.0


def _yarn(frequencies: np.ndarray, parameters: dict) -> np.ndarray:
    """YaRN's frequencies, after `rope_yarn` of ggml."""
    pairs = len(frequencies)
    original = parameters["original_max_position_embeddings"]
    base = parameters["rope_theta"]

    def pair_that_turns(times: float) -> float:
        """The pair of channels which turns so many times in the original context."""
        radians = times * 2 * math.pi
        return pairs * math.log(original / radians) / math.log(base)

    first = max(0, math.floor(pair_that_turns(parameters["beta_fast"])))
    last = min(2 * pairs - 1, math.ceil(pair_that_turns(parameters["beta_slow"])))
    ramp = (np.arange(pairs) - first) / max(0.001, last - first)
    slowed = np.clip(ramp, 0.0, 1.0)
    return frequencies / parameters["factor"] * slowed + frequencies * (1 - slowed)
