"""The models of benchmarks/quality.py at its sizes, all of a size with the same number of parameters within 2 %.

HOPE's three levels step every step: the paper's slowest level steps some 2,000 times in a training, which is not
possible with periods of several steps in runs this short (`--ablation` measures the cost of clocks). A block's mixer
has most of its parameters (small 94 %, medium 92 %): fewer heads with wider levels are worse. For the gated DeltaNet,
more heads with a narrower MLP are worse (docs/log). Every model has HOPE's width, heads of 64, tied vocabulary and
layers (but for Mamba-2, whose blocks have no MLP). One number of each model is fitted so that the parameters match:

| model | what it is | fitted |
|---|---|---|
| hope | HOPE with the memories of its config's defaults, chunks of 64 | nothing: divided by hand |
| hope_frozen | the same, `memory_learning_rate_max=0` | nothing |
| hope_muon, hope_m3, hope_delta_momentum | HOPE trained by another optimizer than AdamW; run where named | nothing |
| hope_attention | HOPE's levels on softmax attention | width of its three levels |
| hope_sparse | the same on sparse attention: a quarter of a block of 512 selected | width of its three levels |
| hope_hybrid | HOPE with sparse attention in the last of four (or of all) layers | width of its three levels |
| hope_hybrid_frozen | the same, `memory_learning_rate_max=0` | width of its three levels |
| llama | transformers' Llama | width of its MLP |
| llama_conv | the same with width-4 convolutions on q, k and v (`peers.py`) | width of its MLP |
| mamba2 | Mamba-2, expansion 2, one group, about twice as many blocks | state size |
| gated_deltanet | Qwen3-Next, all layers gated DeltaNets (values twice as wide as keys) | width of its MLP |
| kimi_linear | Kimi Linear, all layers Kimi Delta Attention | width of its MLP |
| gated_deltanet_2 | the same with gates of channels that erase and write | width of its MLP |

Initial values are transformers' own; only the recurrent peers get those of their authors. Mamba-2's maps
have the standard deviation 1 / sqrt(3 width) instead of 0.1: after 120 steps of `small` on the built-in corpus at
4e-3, seed 1, the loss is 4.453 instead of 4.604 (4.472 with 0.02). For the gated DeltaNet see `peers.py`.
"""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cache

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import benchmarks.quality.peers  # noqa: F401  registers its models
import hope_hf  # noqa: F401  registers HOPE
from hope_hf.optim import RULES

HEAD_DIM = 64
TOLERANCE = 0.02


@dataclass(frozen=True)
class Size:
    """What all models of a size share: dimensions and training."""

    hidden_size: int
    num_hidden_layers: int
    vocab_size: int
    memory_heads: int
    """Heads of HOPE's mixer; with the levels' width they divide a block's parameters."""
    level_intermediate_size: int
    """Width of each of HOPE's three levels."""
    parameters: int
    """Number to which the peers are fitted. HOPE's own may differ, so that a change of HOPE changes no peer."""
    mamba_layers: int
    max_train_steps: int
    learning_rates: tuple[float, ...]
    """The search begins with these; each model is compared at its best rate."""
    more_seeds: tuple[int, ...] = ()
    """Beside seed 1, for HOPE, its frozen twin and the best recurrent peer."""
    vector_learning_rates: tuple[float | None, ...] = (None,)
    """Of norms, biases and convolutions, chosen like the others; None: that of matrices."""
    block_size: int = 512
    per_device_train_batch_size: int = 8
    hybrid_memory_heads: int | None = None
    """Heads of memories in hybrids: more than `memory_heads`, since sparse attention has fewer parameters."""

    @property
    def tokens_per_step(self) -> int:
        return self.block_size * self.per_device_train_batch_size


SIZES = {
    "small": Size(
        hidden_size=128,
        num_hidden_layers=2,
        vocab_size=1024,
        memory_heads=5,
        level_intermediate_size=13,
        parameters=623_000,
        mamba_layers=4,
        max_train_steps=360,
        learning_rates=(4e-3, 8e-3, 1.6e-2),
        more_seeds=(2, 3),
        hybrid_memory_heads=8,
    ),
    "medium": Size(
        hidden_size=256,
        num_hidden_layers=4,
        vocab_size=4096,
        memory_heads=11,
        level_intermediate_size=30,
        parameters=5_170_000,
        mamba_layers=9,
        # The small texts are read 2.4 times. After four passes the model that fits best overfits (docs/log).
        max_train_steps=200,
        learning_rates=(1e-3, 2e-3, 4e-3),
        vector_learning_rates=(3.2e-2, 6.4e-2, 1.28e-1),
        hybrid_memory_heads=13,
    ),
}
# The hybrids of this size have three layers of memories and one of sparse attention.
SIZES["deep"] = replace(
    SIZES["small"],
    num_hidden_layers=4,
    parameters=1_115_000,
    mamba_layers=8,
    more_seeds=(),
    hybrid_memory_heads=6,
)
# Wider levels and one head less than `small`, since an ablation also tests the levels.
ABLATION = replace(
    SIZES["small"],
    memory_heads=4,
    level_intermediate_size=53,
    learning_rates=(1.6e-2,),
    more_seeds=(1, 2),
)
# 8 blocks of 16 tokens, 64 compressed keys and a window of 64 in blocks of 512
SPARSE = {"sparse_block_size": 16, "sparse_compress_stride": 8, "sparse_top_k": 8, "sparse_window": 64}
HOPE, FROZEN, LLAMA, LLAMA_CONV = "hope", "hope_frozen", "llama", "llama_conv"
RECURRENT_PEERS = ("mamba2", "gated_deltanet", "kimi_linear", "gated_deltanet_2")
WITH_ATTENTION = ("hope_attention", "hope_sparse", "hope_hybrid", "hope_hybrid_frozen")
MODELS = (HOPE, FROZEN, *WITH_ATTENTION, LLAMA, LLAMA_CONV, *RECURRENT_PEERS)

OPTIMIZED = {f"hope_{name}": name for name in RULES if name != "adamw"}
"""HOPE under each optimizer besides AdamW."""


# HOPE with one ingredient removed, added or changed: fields of `HopeConfig` that differ from the default.
# `level_periods` count in optimizer steps and `level_intermediate_sizes` in thirds of all levels together. Variants of
# the paper's rule must be compared with `paper`.
VARIANTS = {
    "keys_and_values_from_memories": {"memory_projections": ["k", "v"]},
    "keys_from_memories": {"memory_projections": ["k"]},
    "values_from_memories": {"memory_projections": ["v"]},
    "projection_memories_at_full_rate": {"memory_projections": ["k", "v"], "projection_memory_rate": 1.0},
    "no_value_gate": {"memory_value_gate": False},
    "erase_gate": {"memory_erase_bias": [4.0, 4.0]},
    "erase_gate_half_adds": {"memory_erase_bias": [-16.0, 16.0]},
    "no_retention": {"retention_bias": [16.0, 16.0]},
    "horizons_spread": {"retention_bias": [1.0, 8.0]},
    "longer_horizons_spread": {"retention_bias": [3.0, 8.0]},
    "small_learning_rate": {"memory_learning_rate_bias": [-3.0, -3.0]},
    "spread_learning_rates": {"memory_learning_rate_bias": [-3.0, 3.0]},
    "largest_learning_rate_1_99": {"memory_learning_rate_max": 1.99},
    "heads_of_the_streams_width": {"num_memory_heads": 2},
    "chunks_of_16": {"memory_chunk_size": 16},
    "chunks_of_128": {"memory_chunk_size": 128},
    "one_level": {"level_periods": [1], "level_intermediate_sizes": [3]},
    "clocks_1_2_4": {"level_periods": [1, 2, 4], "level_intermediate_sizes": [1, 1, 1]},
    "clocks_1_4_16": {"level_periods": [1, 4, 16], "level_intermediate_sizes": [1, 1, 1]},
    "levels_side_by_side": {"level_variant": "independent"},
    "four_layers": {"num_hidden_layers": 4, "num_memory_heads": 2, "level_intermediate_sizes": [26, 26, 26]},
    "paper": {"memory_rule": "paper"},
    "paper_depth_2": {"memory_rule": "paper", "memory_depth": 2},
}
NAMES = (*MODELS, *OPTIMIZED, *VARIANTS)


@dataclass(frozen=True)
class Model:
    """A model of a size, as run_clm.py's flags name it."""

    model_type: str
    overrides: str
    """JSON, for --config_overrides."""
    parameters: int
    optimizer: str = "adamw"

    @property
    def identity(self) -> str:
        """A hash of the whole config, defaults included: models with different hashes differ."""
        values = fields_of_model(_config(self.model_type, json.loads(self.overrides)))
        return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:12]

    def new(self, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The model with random weights."""
        return AutoModelForCausalLM.from_config(_config(self.model_type, json.loads(self.overrides)), dtype=dtype)


@cache
def build(name: str, size: Size) -> Model:
    """The model `name` of MODELS or VARIANTS at a size, its parameters within 2 % of the size's (except variants)."""
    # Variants are not fitted: they differ from HOPE in one ingredient only.
    is_hope = name in (HOPE, FROZEN, *OPTIMIZED, *VARIANTS)
    model = _model(name, size, size.level_intermediate_size if is_hope else _fitted(name, size))
    assert name in VARIANTS or abs(model.parameters / size.parameters - 1) < TOLERANCE, (name, size, model.parameters)
    return model


def _fitted(name: str, size: Size) -> int:
    """The multiple of four that brings the model's parameters nearest to the size's."""
    # Parameters are linear in the fitted number.
    low, high = (_model(name, size, fitted).parameters for fitted in (64, 128))
    fitted = 64 + (size.parameters - low) / ((high - low) / 64)
    return 4 * max(1, round(fitted / 4))


def _model(name: str, size: Size, fitted: int) -> Model:
    width, layers = size.hidden_size, size.num_hidden_layers
    heads = width // HEAD_DIM
    shared = {"vocab_size": size.vocab_size, "hidden_size": width, "tie_word_embeddings": True}
    step = size.tokens_per_step
    levels = {
        "num_hidden_layers": layers,
        "level_intermediate_sizes": [fitted] * 3,
        "level_periods": [step] * 3,
    }
    hope = levels | {
        "num_memory_heads": size.memory_heads,
        # The defaults, spelled out: a changed default does not change the comparison.
        "memory_rule": "delta",
        "memory_projections": [],
        "memory_value_gate": True,
        "retention_bias": None,
        # At least four chunks in a block.
        "memory_chunk_size": min(64, size.block_size // 4),
    }
    llama = {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": HEAD_DIM,
        "intermediate_size": fitted,
    }
    kimi = {field: value for field, value in llama.items() if field != "head_dim"}
    kimi |= {"linear_head_dim": HEAD_DIM, "linear_num_heads": heads}
    every = min(4, layers)
    hybrid = {"layer_types": (["hope_memory"] * (every - 1) + ["sparse_attention"]) * (layers // every)} | SPARSE
    hybrid["num_memory_heads"] = size.hybrid_memory_heads or size.memory_heads
    if name in VARIANTS:
        hope |= VARIANTS[name]
        if "level_periods" in VARIANTS[name]:
            hope["level_periods"] = [step * period for period in hope["level_periods"]]
            hope["level_intermediate_sizes"] = [fitted * part for part in hope["level_intermediate_sizes"]]
        name = HOPE
    optimizer = OPTIMIZED.get(name, "adamw")
    name = HOPE if name in OPTIMIZED else name
    model_type, own = {
        "hope": ("hope", hope),
        "hope_frozen": ("hope", hope | {"memory_learning_rate_max": 0.0}),
        "hope_attention": ("hope", levels | {"layer_types": ["full_attention"] * layers}),
        "hope_sparse": ("hope", levels | {"layer_types": ["sparse_attention"] * layers} | SPARSE),
        "hope_hybrid": ("hope", hope | hybrid),
        "hope_hybrid_frozen": ("hope", hope | hybrid | {"memory_learning_rate_max": 0.0}),
        "llama": ("llama", llama),
        "llama_conv": ("llama_conv", llama),
        "mamba2": (
            "mamba2",
            {
                "num_hidden_layers": size.mamba_layers,
                "expand": 2,
                "num_heads": 2 * heads,
                "head_dim": HEAD_DIM,
                "state_size": fitted,
                "n_groups": 1,
                "initializer_range": round((3 * width) ** -0.5, 3),
                "chunk_size": 64,
            },
        ),
        "gated_deltanet": (
            "gated_deltanet",
            llama
            | {
                "linear_key_head_dim": HEAD_DIM,
                "linear_value_head_dim": HEAD_DIM,
                "linear_num_key_heads": heads,
                "linear_num_value_heads": 2 * heads,
            },
        ),
        "kimi_linear": ("kimi_delta", kimi),
        "gated_deltanet_2": ("gated_deltanet_2", kimi),
    }[name]
    overrides = shared | own
    return Model(model_type, json.dumps(overrides), count_parameters(model_type, overrides), optimizer)


def count_parameters(model_type: str, overrides: dict) -> int:
    """Parameters of a new model, tied ones once; allocates no memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_config(model_type, overrides)).num_parameters()


# Fields that are newer than most results, and the values with which the model is as it was before.
NEWER = {
    ("hope", "sliding_window"): None, ("hope", "attention_sinks"): 4, ("hope", "hidden_act"): "silu",
    ("hope", "mlp_bias"): False, ("hope", "attention_out_bias"): None, ("hope", "use_qk_norm"): False,
    ("hope", "level_learning"): None, ("hope", "memory_erase_bias"): None, ("hope", "memory_depth"): 1,
}  # fmt: skip


def fields_of_model(config) -> dict:
    """The fields of a config that define its model; results with different fields are kept apart."""
    values = config.to_dict()
    values.pop("transformers_version", None)
    if "recompute_chunks" in values:
        # changes no result; the value of the published rows
        values["recompute_chunks"] = 32
        # a field of the published rows
        values["paper_rule"] = None
    is_delta = config.model_type == "hope" and config.memory_rule == "delta" and "hope_memory" in config.layer_types
    if is_delta and config.memory_learning_rate_max > 0 and config.conv_kernel_size > 1:
        # in the rows before 2026-11-27 a query begins as the key of its own token
        values["query_begins_as"] = "the next token's key"
    # not a part of the model, or as before there was such a field; newer than most results
    left_out = {name for name, value in values.items() if NEWER.get((config.model_type, name), values) == value}
    if "sparse_attention" not in (values.get("layer_types") or ()):
        left_out |= {name for name in values if name.startswith("sparse_")}
    return {name: value for name, value in values.items() if name not in left_out}


def _config(model_type: str, overrides: dict):
    return AutoConfig.for_model(model_type, **overrides)
