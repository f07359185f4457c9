"""Configuration of HOPE, and its named sizes."""

from copy import deepcopy
from difflib import get_close_matches
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.configuration_utils import PreTrainedConfig

PRESETS = {
    # about 8 M parameters at a vocabulary of 4,096: the demo and the tests; periods for steps of 1,024 tokens
    "tiny": dict(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        level_intermediate_sizes=[368, 368, 368],
        level_periods=[1_024, 4_096, 16_384],
        tie_word_embeddings=False,
    ),
    # about 160 M: first GPU runs of up to 5 B tokens at context 2K; periods for steps of 0.25 M tokens
    "pilot": dict(
        hidden_size=768,
        num_hidden_layers=12,
        level_intermediate_sizes=[896, 896, 896],
        level_periods=[262_144, 1_048_576, 4_194_304],
        tie_word_embeddings=True,
    ),
    # about 760 M: 30 B tokens at context 4K; periods for steps of 0.5 M tokens
    "mid": dict(
        hidden_size=1024,
        num_hidden_layers=24,
        level_intermediate_sizes=[2320, 2320, 2320],
        level_periods=[524_288, 2_097_152, 8_388_608],
        tie_word_embeddings=True,
    ),
    # about 1.3 B: 100 B tokens at context 8K and more
    "target": dict(
        hidden_size=1536,
        num_hidden_layers=32,
        level_intermediate_sizes=[1408, 1408, 1408],
        level_periods=[1_048_576, 4_194_304, 16_777_216],
        tie_word_embeddings=True,
    ),
}

# How the names of fields begin that transformers has not.
_OWN_PREFIXES = ("adaptive_", "gate_mode", "inner_layer", "level_", "memory_", "projection_memory", "retention_bias")
# Of what is stored under a key a write of rate eta leaves 1 - eta: at 2 clipped errors add up over the whole text.
_LARGEST_RATE = 1.99


@strict
class HopeConfig(PreTrainedConfig):
    r"""
    Configuration of a HOPE model: self-modifying memories (or softmax attention) followed by a chain of MLP levels
    that learn at different clocks. Equation numbers are those of the Nested Learning paper (arXiv 2512.24695).

    `HopeConfig(vocab_size=..., hidden_size=..., num_hidden_layers=...)` alone is a good model for every width
    divisible by 64; the other defaults are the project's measured choices.

    Args:
        vocab_size (`int`, *optional*, defaults to 32000):
            Entries of the vocabulary.
        hidden_size (`int`, *optional*, defaults to 768):
            Width of the residual stream.
        num_hidden_layers (`int`, *optional*, defaults to 12):
            Number of `HopeBlock`s.
        head_dim (`int`, *optional*, defaults to 64):
            Width of a head, which is the width of keys, values and queries of one memory.
        num_attention_heads (`int`, *optional*):
            Heads of the mixer. Unless given, `hidden_size / head_dim` for attention and twice as many for memories, as
            in other recurrent models (measured better at equal parameters, see `docs/log.md`).
        num_key_value_heads (`int`, *optional*):
            Key and value heads of the attention mixer; as many as heads unless given.
        mixer (`str`, *optional*, defaults to `"self_modifying"`):
            `"self_modifying"` (self-modifying Titans, HOPE) or `"attention"` (softmax attention, Hope-Attention).
        memory_chunk_size (`int`, *optional*, defaults to 64):
            Tokens after which the errors of the content memory are taken at its new weights (section 8.2). Use the
            same value in training and inference: it is part of the model.
        projection_chunk_size (`int`, *optional*, defaults to 64):
            The same for the memories that make keys, values, learning rates and retentions. Train on blocks of at
            least four of these chunks: in a block of one they never learn.
        memory_depth (`int`, *optional*, defaults to 1):
            Layers of a memory: 2 is equation (89), 1 is `M(z) = z + W z`, half as expensive and no worse in our runs.
        memory_expansion (`int`, *optional*, defaults to 1):
            Hidden width of the content memory in units of `head_dim` (depth 2).
        projection_memory_expansion (`int`, *optional*, defaults to 1):
            The same for the other memories.
        memory_read_mode (`str`, *optional*, defaults to `"inclusive"`):
            What a token reads: the memory with its own write (`"inclusive"`, equation 82), before it (`"exclusive"`,
            equation 86), or as it stood at the chunk's start (`"start"`, equation 90 taken literally).
        adaptive_k (`bool`, *optional*, defaults to `True`):
            Whether a self-modifying memory makes the keys (equation 83), or a linear map that never changes.
        adaptive_v (`bool`, *optional*, defaults to `True`):
            The same for values. A model needs one of the two; `projection_memory_rate=0` leaves both memories at
            their initial state.
        adaptive_q (`bool`, *optional*, defaults to `False`):
            The same for queries, whose memory reads the linear map's output.
        gate_mode (`str`, *optional*, defaults to `"static"`):
            Whether learning rate and retention come from a linear map of the input (`"static"`, measured better and
            cheaper, see `docs/log.md`) or from self-modifying memories of their own (`"memory"`, equation 83).
        memory_erase (`str`, *optional*, defaults to `"output"`):
            Which layers of a memory erase along their input before they write (the delta rule of equation 88):
            `"output"`, `"both"` or `"none"`. At depth 1 the first two are the same.
        memory_hidden_norm (`str`, *optional*, defaults to `"unit"`):
            Hidden activations of a two-layer memory: scaled to norm 1 (`"unit"`), left alone with the outer step
            divided by `max(1, |s|^2)` (`"step"`), or left alone (`"none"`, the paper's).
        inner_layer_rate (`float`, *optional*, defaults to 0.1):
            Step of a two-layer memory's inner layer relative to the outer one's.
        projection_memory_rate (`float`, *optional*, defaults to 0.1):
            Step of the memories that make keys, values and gates relative to the content memory's.
        memory_learning_rate_max (`float`, *optional*, defaults to 1.0):
            Largest step eta of equation (88), reached by the sigmoid of the learning-rate gate. 0 freezes every memory
            at its learned initial state. Values above 1 need `memory_error_clip`. At 1.99, the largest allowed, what
            is stored under a key changes its sign and keeps 0.99 of its size; at 2 the state would grow with the text.
        memory_learning_rate_bias_min (`float`, *optional*, defaults to 0.0):
            Bias of the learning-rate gate before the sigmoid at initialisation, of the head that writes least.
        memory_learning_rate_bias_max (`float`, *optional*, defaults to 0.0):
            The same of the head that writes most; the heads between are spread evenly. With a largest rate of 1.99,
            biases from 0 to 8 begin with everything between replacing what is stored under a key and flipping its
            sign, which the formal languages need (`benchmarks/formal_languages.yaml`).
        retention_bias_min (`float`, *optional*, defaults to 1.0):
            Bias of the retention gate alpha before the sigmoid at initialisation, of the fastest forgetting head. A
            model of few heads that must recall rather than predict text learns faster with 3.
        retention_bias_max (`float`, *optional*, defaults to 8.0):
            The same of the slowest; the heads between are spread evenly (horizons of about 3 to 3,000 tokens).
        memory_decay_to (`str`, *optional*, defaults to `"initial"`):
            What retention forgets towards: the learned `"initial"` state, or `"zero"` (literally equation 88).
        memory_error_clip (`float`, *optional*, defaults to 2.0):
            Largest norm of a token's local error per layer; `None` is the paper's unclipped rule, which can diverge.
        memory_target_norm (`bool`, *optional*, defaults to `True`):
            Whether self-generated targets (equation 84) are made from the unit value.
        memory_gradient_factor (`float`, *optional*, defaults to 1.0):
            Factor on the error: 1 is equation (93), 2 the exact gradient of the squared error.
        memory_momentum (`bool`, *optional*, defaults to `False`):
            Whether writes are carried on by a momentum with a gate of its own.
        conv_kernel_size (`int`, *optional*, defaults to 4):
            Width of the causal depthwise convolutions on queries, keys and values, in tokens.
        recompute_chunks (`int`, *optional*, defaults to 8):
            Chunks whose activations are recomputed together in the backward pass (the last such group keeps its own);
            0 keeps all activations.
        level_periods (`list[int]`, *optional*, defaults to `[1000000, 4000000, 16000000]`):
            Continuum memory: tokens per update of each MLP level, fast to slow.
        level_intermediate_sizes (`list[int]`, *optional*):
            Hidden width of each level. Unless given, all levels together have the parameters that other models give
            to a block: four times the square of the width beside memories, eight times beside attention.
        level_variant (`str`, *optional*, defaults to `"sequential"`):
            Levels in a chain (`"sequential"`, equation 73) or side by side with learned weights (`"independent"`,
            equation 74).
        max_position_embeddings (`int`, *optional*, defaults to 1048576):
            Only informs tools that ask for it: the memories have no longest length.
        rope_parameters (`dict`, *optional*):
            Rotary positions of the attention mixer, as in other models of transformers.

    Example:

    ```python
    >>> from hope_hf import HopeConfig, HopeModel

    >>> # Initializing a configuration of a named size, with another number of layers
    >>> configuration = HopeConfig.from_preset("tiny", num_hidden_layers=2)

    >>> # Initializing a model (with random weights) from that configuration
    >>> model = HopeModel(configuration)

    >>> # Accessing the model configuration
    >>> model.config.layer_types
    ['hope_memory', 'hope_memory']

    ```
    """

    model_type = "hope"
    keys_to_ignore_at_inference = ["past_key_values"]
    base_model_pp_plan = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    num_hidden_layers: int = 12
    head_dim: int = 64
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    mixer: Literal["self_modifying", "attention"] = "self_modifying"

    memory_chunk_size: int = 64
    projection_chunk_size: int = 64
    memory_depth: int = 1
    memory_expansion: int = 1
    projection_memory_expansion: int = 1
    memory_read_mode: Literal["inclusive", "exclusive", "start"] = "inclusive"
    adaptive_k: bool = True
    adaptive_v: bool = True
    adaptive_q: bool = False
    gate_mode: Literal["static", "memory"] = "static"
    memory_erase: Literal["output", "both", "none"] = "output"
    memory_hidden_norm: Literal["unit", "step", "none"] = "unit"
    inner_layer_rate: float | int = 0.1
    projection_memory_rate: float | int = 0.1
    memory_learning_rate_max: float | int = 1.0
    memory_learning_rate_bias_min: float | int = 0.0
    memory_learning_rate_bias_max: float | int = 0.0
    retention_bias_min: float | int = 1.0
    retention_bias_max: float | int = 8.0
    memory_decay_to: Literal["initial", "zero"] = "initial"
    memory_error_clip: float | int | None = 2.0
    memory_target_norm: bool = True
    memory_gradient_factor: float | int = 1.0
    memory_momentum: bool = False
    conv_kernel_size: int = 4
    recompute_chunks: int = 8

    level_periods: list[int] | None = None
    level_intermediate_sizes: list[int] | None = None
    level_variant: Literal["sequential", "independent", "nested"] = "sequential"

    rms_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1_048_576
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        wide = self.mixer == "self_modifying"
        if self.num_attention_heads is None and self.head_dim > 0 and self.hidden_size % self.head_dim == 0:
            self.num_attention_heads = (2 if wide else 1) * self.hidden_size // self.head_dim
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.level_periods is None:
            self.level_periods = [1_000_000, 4_000_000, 16_000_000]
        if self.level_intermediate_sizes is None and self.level_periods:
            # A SwiGLU of width w has 3 * w * hidden_size parameters.
            width = (4 if wide else 8) * self.hidden_size / (3 * len(self.level_periods))
            self.level_intermediate_sizes = [max(8, round(width / 8) * 8)] * len(self.level_periods)
        # no field, and never saved; older versions of transformers add to it for tied heads
        self.base_model_tp_plan = self._tensor_parallel_plan()
        super().__post_init__(**kwargs)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "HopeConfig":
        """The configuration of a named size (`tiny`, `pilot`, `mid`, `target`), with fields overridden by name."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset '{name}': choose one of {', '.join(PRESETS)}")
        for field in overrides:
            cls.check_field(field)
        return cls(**{**deepcopy(PRESETS[name]), **overrides})

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in transformers, but a field of HOPE's that this version does not have is an error, not an attribute."""
        for name in config_dict:
            if name.startswith(_OWN_PREFIXES) and name not in cls.__dataclass_fields__:
                raise ValueError(
                    f"the configuration has the field '{name}', which this version of HOPE does not know: another "
                    "version wrote it; load it with that one, or with trust_remote_code=True where its code is there"
                )
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def check_field(cls, name: str) -> None:
        """Refuse a misspelled field, which `PreTrainedConfig` would silently keep as an attribute."""
        if name not in cls.__dataclass_fields__:
            close = get_close_matches(name, cls.__dataclass_fields__, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else ""
            raise ValueError(f"HopeConfig has no field '{name}'{hint}")

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """Which linear maps tensor parallelism cuts, for transformers' `DistributedConfig(tp_size=...)`.

        Attention and levels keep their halves to themselves between two maps. Memories run whole on every rank: of the
        mixer only the weights of its maps are shared out, and their outputs are gathered.
        """
        # CODEPATH: mixer='self_modifying' in HOPE, 'attention' in Hope-Attention.
        if self.mixer == "attention":
            mixer = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
        else:
            maps = ["in_proj", "q_proj", "g_proj", "o_proj"]
            maps += ([] if self.adaptive_k else ["k_proj"]) + ([] if self.adaptive_v else ["v_proj"])
            mixer = dict.fromkeys(maps, "colwise_gather_output")
        level = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
        return {f"layers.*.mixer.{name}": style for name, style in mixer.items()} | {
            f"layers.*.continuum.levels.*.{name}": style for name, style in level.items()
        }

    @property
    def layer_types(self) -> list[str]:
        """Kind of cache of each layer, for transformers' caches."""
        kind = "hope_memory" if self.mixer == "self_modifying" else "full_attention"
        return [kind] * self.num_hidden_layers

    @layer_types.setter
    def layer_types(self, kinds: list[str]) -> None:
        # Tools that copy a configuration and change its depth, as PEFT's ShadowPEFT, set it to what it is already.
        if list(kinds) != self.layer_types:
            raise ValueError("`layer_types` follows from `mixer` and `num_hidden_layers`: set these instead")

    def validate_layer_type(self):
        """Part of `@strict`-powered validation: `layer_types` follows from `mixer`, so there is nothing to check."""

    def validate_architecture(self):
        """Part of `@strict`-powered validation: what single fields and pairs of them must satisfy."""
        for name in (
            "vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "memory_chunk_size",
            "projection_chunk_size", "memory_expansion", "projection_memory_expansion", "conv_kernel_size",
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}")
        for name in ("inner_layer_rate", "projection_memory_rate", "recompute_chunks"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)}")
        if self.num_attention_heads is None:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) is not divisible by `head_dim` ({self.head_dim}): choose another "
                "width, or give `num_attention_heads`"
            )
        if self.num_attention_heads < 1:
            raise ValueError(f"`num_attention_heads` must be at least 1, got {self.num_attention_heads}")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})"
            )
        self._validate_memory()
        self._validate_levels()

    def _validate_memory(self):
        if self.memory_depth not in (1, 2):
            raise ValueError(f"`memory_depth` must be 1 or 2, got {self.memory_depth}")
        if not self.adaptive_k and not self.adaptive_v:
            raise ValueError(
                "`adaptive_k` and `adaptive_v` are both off: leave one on, and set `projection_memory_rate` to 0 for "
                "projections that never change"
            )
        if self.memory_error_clip is not None and self.memory_error_clip <= 0:
            raise ValueError(f"`memory_error_clip` must be positive or None, got {self.memory_error_clip}")
        if self.memory_gradient_factor not in (1, 2):
            raise ValueError(f"`memory_gradient_factor` must be 1 or 2, got {self.memory_gradient_factor}")
        if not 0 <= self.memory_learning_rate_max <= _LARGEST_RATE:
            raise ValueError(
                f"`memory_learning_rate_max` must be between 0 and {_LARGEST_RATE}, got "
                f"{self.memory_learning_rate_max}: at 2 what is stored turns over without shrinking, and grows with "
                "the text"
            )
        if self.memory_learning_rate_max > 1 and self.memory_error_clip is None:
            raise ValueError(
                f"`memory_learning_rate_max` above 1 ({self.memory_learning_rate_max}) diverges without "
                "`memory_error_clip`: set it, for instance to 2"
            )

    def _validate_levels(self):
        periods, sizes = self.level_periods, self.level_intermediate_sizes
        if not periods or len(periods) != len(sizes):
            raise ValueError(
                f"`level_periods` ({periods}) and `level_intermediate_sizes` ({sizes}) must be two lists of the same "
                "length, one entry a level, fast to slow"
            )
        if min(periods) < 1 or min(sizes) < 1:
            raise ValueError(f"`level_periods` ({periods}) and `level_intermediate_sizes` ({sizes}) must be positive")
        if sorted(periods) != list(periods):
            raise ValueError(f"`level_periods` must go from fast to slow, got {periods}")
        if self.level_variant == "nested":
            raise ValueError(
                "`level_variant='nested'` needs updates inside a sequence, which do not exist yet: use 'sequential' "
                "or 'independent'"
            )


__all__ = ["PRESETS", "HopeConfig"]
