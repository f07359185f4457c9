"""Configuration of HOPE, and its named sizes."""

import math
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict
from difflib import get_close_matches
from typing import Literal

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto import modeling_auto

from .attention import rotary_reach
from .continuum import CONTINUA
from .level_learning import LevelLearning
from .memory_mixer import RULES
from .mixers import MIXERS

PRESETS = {
    # about 8 M parameters at a vocabulary of 4,096: the demo and the tests
    "tiny": dict(
        vocab_size=4096,
        hidden_size=256,
        num_hidden_layers=4,
        level_intermediate_sizes=[1008],
        tie_word_embeddings=False,
    ),
    # about 160 M: first GPU runs of up to 5 B tokens at context 2K
    "pilot": dict(hidden_size=768, num_hidden_layers=12, level_intermediate_sizes=[2256], tie_word_embeddings=True),
    # about 760 M: 30 B tokens at context 4K
    "mid": dict(hidden_size=1024, num_hidden_layers=24, level_intermediate_sizes=[6360], tie_word_embeddings=True),
    # about 1.3 B: 100 B tokens at context 8K and more
    "target": dict(hidden_size=1536, num_hidden_layers=32, level_intermediate_sizes=[3288], tie_word_embeddings=True),
}


def _hybrid(preset: str, level_intermediate_size: int) -> dict:
    """The preset with sparse attention in every fourth layer, four query heads per key head, and a wider level."""
    sizes = PRESETS[preset]
    kinds = ["hope_memory", "hope_memory", "hope_memory", "sparse_attention"]
    return sizes | dict(
        layer_types=kinds * (sizes["num_hidden_layers"] // len(kinds)),
        num_key_value_heads=sizes["hidden_size"] // 256,
        level_intermediate_sizes=[level_intermediate_size],
    )


# hybrids have as many parameters as the presets that they are named after
for _name, _size in (("tiny", 1176), ("pilot", 2736), ("mid", 7008), ("target", 4248)):
    PRESETS[f"{_name}-hybrid"] = _hybrid(_name, _size)

# Prefixes of HOPE's own fields, also of those of older versions.
_OWN_PREFIXES = (
    "adaptive_", "gate_mode", "inner_layer", "level_", "memory_", "mixer", "num_memory_heads", "paper_rule",
    "projection_", "retained_", "retention_bias", "sparse_",
)  # fmt: skip
# Options that the paper's rule had, at the values that it has now.
_PAPER_RULE = {
    "depth": 1, "erase": "output", "hidden_norm": "unit", "inner_rate": 0.1, "error_clip": 2.0, "target_norm": True,
    "read_mode": "inclusive", "decay_to": "initial",
}  # fmt: skip
# The name of a field in config.json. transformers reads a tokenizer's folder without our class, and then refuses kinds
# of layers that are not its own in `layer_types`, which files of before have.
_SAVED_AS = {"layer_types": "mixer_types"}
# The smallest value of single fields.
_POSITIVE = (
    "vocab_size", "hidden_size", "num_hidden_layers", "head_dim", "memory_chunk_size", "conv_kernel_size",
    "sparse_block_size", "sparse_compress_stride", "sparse_top_k", "sparse_window",
)  # fmt: skip
_LEAST = dict.fromkeys(_POSITIVE, 1) | dict.fromkeys(("projection_memory_rate", "recompute_chunks"), 0)


@strict
class HopeConfig(PreTrainedConfig):
    r"""
    Configuration of a HOPE model: in each block self-modifying memories (or attention), then one MLP, or several in a
    chain: levels, which training may update at different periods. Equation numbers are those of the Nested Learning
    paper (arXiv 2512.24695).

    `vocab_size`, `hidden_size` (a multiple of 64) and `num_hidden_layers` are all you need to set; the other defaults
    are the project's measured choices.

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
            Heads of attention layers; `hidden_size / head_dim` unless given.
        num_key_value_heads (`int`, *optional*):
            Key and value heads of attention layers; as many as heads unless given.
        layer_types (`list[str]`, *optional*):
            Mixer of each layer: `"hope_memory"` (self-modifying memories), `"full_attention"` (softmax attention,
            Hope-Attention), `"window_attention"` (the same to the last tokens and the first ones),
            `"retaining_attention"` (the same, and to a fixed number of older tokens) or `"sparse_attention"` (native
            sparse attention, arXiv 2502.11089). Memories in all layers unless given.
        num_memory_heads (`int`, *optional*):
            Heads of memory layers; `2 * hidden_size / head_dim` unless given, as in other recurrent models (measured
            better at equal parameters, see `docs/log`).
        memory_rule (`str`, *optional*, defaults to `"delta"`):
            Update rule of memories: the gated delta rule (`"delta"`, see `memory_delta.py`), or the paper's rule
            (`"paper"`, see `memory_paper.py`).
        memory_depth (`int`, *optional*, defaults to 1):
            Layers of a memory under the paper's rule: 1, a linear map, or 2, equation (89).
        memory_projections (`list[str]`, *optional*):
            Which of keys and values memories project (equation 83) after their linear map; unless given, `["k", "v"]`
            under the paper's rule and none under the delta rule, where no gain is measured (`docs/log`).
        memory_chunk_size (`int`, *optional*, defaults to 64):
            Tokens per chunk. Under the delta rule without `memory_projections` it changes only speed and rounding.
            Otherwise keys and values are projected with the memories' weights of the chunk's start (section 8.2), and
            it is part of the model: use the same value in training and inference. Train on blocks of at least four
            chunks; with one chunk per block the projecting memories are never trained.
        projection_memory_rate (`float`, *optional*, defaults to 0.1):
            Step of the memories that project, relative to that of the content memory; 0 keeps their initial state.
        memory_learning_rate_max (`float`, *optional*, defaults to 1.0):
            Largest step eta of equation (88), which scales the sigmoid of the learning-rate gate. 0 keeps every memory
            at its learned initial state. With 1.99, the largest value allowed, a write multiplies the old value at
            its key by -0.99; with 2 the state would grow with the text.
        memory_learning_rate_bias (`list[float]`, *optional*, defaults to `[0.0, 0.0]`):
            Initial bias of the learning-rate gate before the sigmoid, of the first and of the last head; the heads
            between are spaced evenly. With a largest rate of 1.99, `[0, 8]` ranges from replacing the old value at a
            key to flipping its sign, which formal languages need (`benchmarks/formal_languages.yaml`).
        memory_erase_bias (`list[float]`, *optional*):
            Of the delta rule: adds a gate of every head and token, the share of the learning rate that erases what is
            stored at the key; all of it writes. Where the share is near 0 a memory adds, and can count. These are the
            gate's biases before the sigmoid at initialisation, of the first and of the last head; the heads between
            are spaced evenly. With `[-32, 16]` the first half of them erases nothing at the start, as counting needs.
            Needs `memory_value_gate`, and no `memory_projections`.
        memory_value_gate (`bool`, *optional*, defaults to `True`):
            Delta rule only: whether a gate per head and token sets the norm of values, from 0 to 2. Without it values
            keep the norm that their projection and convolution give.
        retention_bias (`list[float]`, *optional*):
            Initial bias of the retention gate alpha before the sigmoid, of the first head, which decays fastest, and
            of the last; the heads between are spaced evenly. Unless given, `[1, 8]` under the paper's rule (horizons
            of about 3 to 3,000 tokens); the delta rule draws the gated DeltaNet's initial gates, time steps between
            0.001 and 0.1 times a rate of up to 16.
        conv_kernel_size (`int`, *optional*, defaults to 4):
            Kernel size of the causal depthwise convolutions of queries, keys and values, in tokens.
        recompute_chunks (`int`, *optional*, defaults to 64):
            Last chunks of a text, which keep all activations for the backward pass. Of the chunks before, the backward
            pass computes the cheap activations again; under the paper's rule all, in groups of as many chunks. 0 keeps
            all activations of all chunks.
        sparse_block_size (`int`, *optional*, defaults to 64):
            Tokens per block that sparse attention selects.
        sparse_compress_stride (`int`, *optional*, defaults to 32):
            Tokens per compressed key; divides `sparse_block_size`.
        sparse_top_k (`int`, *optional*, defaults to 16):
            Blocks that a query reads: the document's first, its own and the one before it, then those with the largest
            compressed attention.
        sparse_window (`int`, *optional*, defaults to 512):
            Last tokens that a query reads, its own included; a multiple of `sparse_block_size`.
        sliding_window (`int`, *optional*):
            Last tokens that a query of a `"window_attention"` layer sees, its own included, as in Mistral; a
            `"retaining_attention"` layer sees up to `retained_block_size - 1` more. Required where there is such a
            layer.
        attention_sinks (`int`, *optional*, defaults to 4):
            First tokens of the document that every query of such a layer sees as well, in a `"window_attention"` layer
            at the distance that they have when the window is first full; 0 for none. Pretrained models that read
            beyond their window need a few (arXiv 2309.17453).
        retained_tokens (`list[list[int]]`, *optional*):
            Tokens behind the window that each head of keys retains, a list for each `"retaining_attention"` layer;
            `sliding_window` for each head unless given. `hope-hf retain` shares them out.
        retained_block_size (`int`, *optional*, defaults to 128):
            Tokens that leave the window of such a layer together. It is part of the model. With `sliding_window` it is
            shorter than the text whose positions the model knows.
        level_periods (`list[int]`, *optional*):
            Continuum memory: tokens of training per update of each MLP level, fast to slow (equation 71). Unless
            given, 1 for every level: no period is shorter than an optimizer step, so every step updates it. A longer
            period only delays its level, which cost 0.05 nats where it was measured (`docs/log`).
        level_intermediate_sizes (`list[int]`, *optional*):
            Hidden width of each level. Unless given, there is one level for each of `level_periods`, or one, and the
            levels of a block together have `2 * hidden_size ** 2` parameters beside memories and
            `8 * hidden_size ** 2` beside attention, as blocks of other models.
        level_variant (`str`, *optional*, defaults to `"sequential"`):
            Levels in a chain (`"sequential"`, equation 73) or side by side with learned weights (`"independent"`,
            equation 74).
        hidden_act (`str`, *optional*, defaults to `"silu"`):
            Activation of the levels' gates, a name that transformers knows.
        mlp_bias (`bool`, *optional*, defaults to `False`):
            Whether the linear maps of levels have biases.
        attention_bias (`bool`, *optional*, defaults to `False`):
            Whether the linear maps of softmax attention have biases.
        attention_out_bias (`bool`, *optional*):
            The same for the output map alone, which Qwen2 has without a bias; `attention_bias` unless given.
        use_qk_norm (`bool`, *optional*, defaults to `False`):
            Whether softmax attention normalises queries and keys over the head width before it rotates them, as Qwen3
            does.
        level_learning (`LevelLearning` or `dict`, *optional*):
            Whether and how levels learn from the text that the model reads with `learn=True`, explained at
            `level_learning.LevelLearning`: `matrices` (["down_proj"]), `blocks` (the upper quarter), `periods` (512
            tokens), `rate` (0.0025), `drift` (0.01), `gate` (True) and `brake` (0.1).
        max_position_embeddings (`int`, *optional*, defaults to 1048576):
            For tools that read it; memories have no maximal length. Give lm-eval's `batch_size=auto` a `max_length`.
        rope_parameters (`dict`, *optional*):
            Rotary positions of the attention mixer, as in other models of transformers. Frequencies do not change
            while a text is read: attention without a window refuses texts beyond the trained length of the rope types
            "dynamic" and "longrope".

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
    keys_to_ignore_at_inference = ["cache", "past_key_values"]
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
    layer_types: list[str] | None = None

    num_memory_heads: int | None = None
    memory_rule: Literal["delta", "paper"] = "delta"
    memory_depth: Literal[1, 2] = 1
    memory_projections: list[str] | None = None
    memory_chunk_size: int = 64
    projection_memory_rate: float | int = 0.1
    memory_learning_rate_max: float | int = 1.0
    memory_learning_rate_bias: list[float | int] | None = None
    memory_value_gate: bool = True
    memory_erase_bias: list[float | int] | None = None
    retention_bias: list[float | int] | None = None
    conv_kernel_size: int = 4
    recompute_chunks: int = 64

    sparse_block_size: int = 64
    sparse_compress_stride: int = 32
    sparse_top_k: int = 16
    sparse_window: int = 512

    sliding_window: int | None = None
    attention_sinks: int = 4

    retained_tokens: list[list[int]] | None = None
    retained_block_size: int = 128

    level_periods: list[int] | None = None
    level_intermediate_sizes: list[int] | None = None
    level_variant: Literal["sequential", "independent"] = "sequential"
    hidden_act: str = "silu"
    mlp_bias: bool = False
    level_learning: LevelLearning | dict | None = None

    rms_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    use_cache: bool = True
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 1_048_576
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_out_bias: bool | None = None
    use_qk_norm: bool = False
    attention_dropout: float | int = 0.0
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["hope_memory"] * self.num_hidden_layers
        self._fill_heads()
        if self.memory_learning_rate_bias is None:
            self.memory_learning_rate_bias = [0.0, 0.0]
        RULES[self.memory_rule].fill_defaults(self)
        self._fill_retained()
        self._fill_levels()
        # no field, and never saved; older versions of transformers add to it for tied heads
        self.base_model_tp_plan = self._tensor_parallel_plan()
        super().__post_init__(**kwargs)

    def _fill_heads(self) -> None:
        """Numbers of heads that fill the width; `None` where they cannot, which `validate_architecture` refuses."""
        heads = memory_heads = None
        if self.head_dim > 0 and self.hidden_size % self.head_dim == 0:
            heads = self.hidden_size // self.head_dim
            memory_heads = 2 * heads
        if self.num_attention_heads is None:
            self.num_attention_heads = heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_memory_heads is None:
            self.num_memory_heads = memory_heads

    def _fill_retained(self) -> None:
        """As many retained tokens as a window has."""
        layers = self.layer_types.count("retaining_attention")
        if self.retained_tokens is None and layers and self.sliding_window and self.num_key_value_heads:
            self.retained_tokens = [[self.sliding_window] * self.num_key_value_heads] * layers

    def _fill_levels(self) -> None:
        """Levels that step every time, of equal sizes."""
        if self.level_periods is None:
            # less than an optimizer step, so every step
            self.level_periods = [1] * len(self.level_intermediate_sizes or [1])
        if self.level_intermediate_sizes is None and self.level_periods:
            # A SwiGLU of width w has 3 * w * hidden_size parameters.
            squares = min((mixer.level_parameters for mixer in self.mixers), default=0)
            levels = len(self.level_periods)
            width = squares * self.hidden_size / (3 * levels)
            multiple_of_8 = round(width / 8) * 8
            self.level_intermediate_sizes = [max(8, multiple_of_8)] * levels

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, LevelLearning.of(value) if name == "level_learning" else value)

    def to_diff_dict(self) -> dict:
        """The fields as config.json holds them, with `layer_types` as `mixer_types`."""
        fields = super().to_diff_dict()
        for name, saved_name in _SAVED_AS.items():
            if name in fields:
                fields[saved_name] = fields.pop(name)
        return fields

    def to_dict(self) -> dict:
        """The fields by name."""
        fields = super().to_dict()
        if self.level_learning is not None:
            fields["level_learning"] = asdict(self.level_learning)
        return fields

    @property
    def mixers(self) -> list[type]:
        """The class of every layer's mixer (`layers.Mixer`), without kinds that `validate` refuses."""
        return [MIXERS[kind] for kind in self.layer_types if kind in MIXERS]

    @property
    def levels_class(self) -> type:
        """The class of every block's levels (`continuum.ContinuumMemory`)."""
        return CONTINUA[self.level_variant]

    @property
    def needs(self) -> frozenset[str]:
        """Context that mixers need for a call (`layers.Mixer.needs`)."""
        needs = set()
        for mixer in self.mixers:
            needs |= mixer.needs
        return frozenset(needs)

    @property
    def keeps_state(self) -> bool:
        """Whether a layer has a state besides softmax attention's keys and values."""
        return bool(self.needs & {"chunks", "blocks", "window", "retained"})

    @property
    def unused_fields(self) -> tuple[str, ...]:
        """Prefixes of the fields of mixers that no layer has."""
        unused = set()
        used = set()
        for mixer in MIXERS.values():
            fields = used if mixer in self.mixers else unused
            fields.update(mixer.own_fields)
        return tuple(unused - used)

    @property
    def has_window(self) -> bool:
        """Whether any layer sees the last `sliding_window` tokens and older ones only in part."""
        return bool(self.needs & {"window", "retained"})

    @property
    def has_memories(self) -> bool:
        """Whether any layer has a state of constant size, as self-modifying memories have."""
        return any(mixer.is_recurrent for mixer in self.mixers)

    @property
    def has_positions(self) -> bool:
        """Whether any layer has attention, which needs rotary positions."""
        return "rotary" in self.needs

    @property
    def longest_text(self) -> int | None:
        """Positions that attention knows, in tokens; `None` if no layer sees farther than a window."""
        if not self.needs & {"mask", "blocks"}:
            return None
        return min(self.max_position_embeddings, rotary_reach(self) or math.inf)

    @property
    def attention_layer(self) -> int | None:
        """The first layer that takes transformers' attention masks."""
        for layer, mixer in enumerate(self.mixers):
            if "mask" in mixer.needs:
                return layer
        return None

    def mixing_flops_per_token(self, sequence_length: int) -> int:
        """Forward FLOPs of the mixers' own products per token of a text of `sequence_length` tokens.

        Triangular solves are not counted.
        """
        return sum(mixer.mixing_flops(self, sequence_length) for mixer in self.mixers)

    @classmethod
    def from_preset(cls, name: str, **overrides) -> "HopeConfig":
        """The configuration of a named size (`tiny`, `pilot`, `mid`, `target`; `-hybrid`), with fields overridden."""
        if name not in PRESETS:
            raise ValueError(f"unknown preset '{name}': choose one of {', '.join(PRESETS)}")
        for field in overrides:
            cls.check_field(field)
        return cls(**{**deepcopy(PRESETS[name]), **overrides})

    @classmethod
    def from_dict(cls, config_dict: dict, **kwargs):
        """As in transformers, but a field of another version of HOPE is an error, not an attribute."""
        fields = dict(config_dict)
        for name, saved_name in _SAVED_AS.items():
            if saved_name in fields:
                fields.setdefault(name, fields.pop(saved_name))
        _read_paper_rule(fields)
        for name in fields:
            if name.startswith(_OWN_PREFIXES) and name not in cls.__dataclass_fields__:
                raise ValueError(
                    f"the configuration has the field '{name}', which this version of HOPE does not know: another "
                    "version wrote it; load it with that one, or with trust_remote_code=True where its code is there"
                )
        return super().from_dict(fields, **kwargs)

    @classmethod
    def check_field(cls, name: str) -> None:
        """Refuse a misspelled field, which `PreTrainedConfig` would silently keep as an attribute."""
        if name not in cls.__dataclass_fields__:
            raise ValueError(f"HopeConfig has no field '{name}'{_similar(name, cls.__dataclass_fields__)}")

    def _tensor_parallel_plan(self) -> dict[str, str]:
        """Linear maps that tensor parallelism shards, for transformers' `DistributedConfig(tp_size=...)`.

        Levels, and attention if all layers have it, are computed in slices between two maps. Memories and sparse
        attention are computed whole on every rank: only the weights of their maps are sharded, and the outputs are
        gathered. The plan is the same for all layers, so attention beside such layers is also computed whole.
        """
        plan = {}
        kinds = dict.fromkeys(self.mixers)
        for mixer in kinds:
            for name, style in mixer.tensor_parallel_maps(self).items():
                if len(kinds) == 1:
                    plan[f"layers.*.mixer.{name}"] = style
                elif name.endswith("_proj"):
                    plan[f"layers.*.mixer.{name}"] = "colwise_gather_output"
        for name, style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise")):
            plan[f"layers.*.continuum.levels.*.{name}"] = style
        return plan

    def validate_layer_type(self):
        """One known kind for every layer; `@strict` calls it."""
        for kind in self.layer_types:
            if kind not in MIXERS:
                raise ValueError(f"`layer_types` holds '{kind}': choose among {', '.join(MIXERS)}")
        if len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries, and `num_hidden_layers` is "
                f"{self.num_hidden_layers}: give one entry a layer, or leave `layer_types` out for memories everywhere"
            )

    def validate_architecture(self):
        """Conditions on single fields and on pairs of fields; `@strict` calls it."""
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(f"`{name}` must be at least {least}, got {getattr(self, name)}")
        for mixer in self.mixers:
            for name in mixer.heads:
                self._validate_heads(name)
        if self.has_positions and self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` ({self.num_attention_heads}) must be a multiple of `num_key_value_heads` "
                f"({self.num_key_value_heads})"
            )
        if self.hidden_act not in ACT2FN:
            hint = _similar(self.hidden_act, ACT2FN) or ", such as 'silu' or 'gelu'"
            raise ValueError(f"`hidden_act` '{self.hidden_act}' is no activation of transformers{hint}")
        for mixer in MIXERS.values():
            mixer.check_config(self)
        self._validate_levels()

    def _validate_heads(self, name: str):
        heads = getattr(self, name)
        if heads is None:
            raise ValueError(
                f"`hidden_size` ({self.hidden_size}) is not divisible by `head_dim` ({self.head_dim}): choose "
                f"another width, or give `{name}`"
            )
        if heads < 1:
            raise ValueError(f"`{name}` must be at least 1, got {heads}")

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
        if self.level_learning is not None:
            self.level_learning.check(self)


def _read_paper_rule(fields: dict) -> None:
    """Replace the field of before the options of the paper's rule were fixed, where it has the values of today."""
    rule = fields.get("paper_rule")
    if rule is None:
        fields.pop("paper_rule", None)
    elif isinstance(rule, dict) and _PAPER_RULE | rule | {"depth": 1} == _PAPER_RULE:
        del fields["paper_rule"]
        fields["memory_depth"] = rule.get("depth", 1)


def _similar(name: str, known: Iterable[str]) -> str:
    """What an error adds if a known name is similar."""
    close = get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


# transformers and lm-eval ask these lists what a model predicts: `Trainer` shifts labels for the names of one alone.
# lm-eval asks before the model's code is loaded, so they are filled here. `fully_shard` writes FSDP before the name.
for _task in ("CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING"):
    _names = getattr(modeling_auto, f"MODEL_FOR_{_task}_MAPPING_NAMES")
    _head = "HopeFor" + _task.title().replace("_", "").replace("Lm", "LM")
    _names |= {HopeConfig.model_type: _head, f"{HopeConfig.model_type}_fsdp2": f"FSDP{_head}"}

__all__ = ["PRESETS", "HopeConfig"]
