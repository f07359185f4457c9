"""Names and shapes of a causal LM's parameters from its config alone, and the units in which FSDP gathers them.

HOPE, Llama (and Mistral, which has the same parameters) and GPT-2 are written down here. The shapes of any other
architecture are read from the model on the meta device, which holds no numbers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import AutoModelForCausalLM

from hope_hf.cli.process import MISTAKES, one_line

# Where a parameter belongs outside the blocks. The tail (last norm, head and a tied embedding) is gathered as one.
EMBEDDING, TAIL, ROOT = "embedding", "tail", "root"


@dataclass(frozen=True)
class Weight:
    """One parameter.

    Attributes:
        name: as in the model.
        shape: of the whole parameter.
        unit: the number of its block, or `EMBEDDING`, `TAIL` or `ROOT`.
        level: of the continuum memory, 0 the fastest; None outside of it.
    """

    name: str
    shape: tuple[int, ...]
    unit: int | str
    level: int | None = None

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_muon(self) -> bool:
        """Whether `--optimizer muon` updates it by Muon: the rule of `hope_hf.optim.build`."""
        owner, _, own = self.name.rpartition(".")
        is_flat = len(self.shape) < 2 or "norm" in owner.rpartition(".")[2].lower() or own.endswith("bias")
        excluded = is_flat or not isinstance(self.unit, int) or "initial_memory" in self.name
        return not excluded and min(self.shape[-2:]) > 1


@dataclass(frozen=True)
class Shapes:
    """All parameters of a model, tied ones once; `is_formula`: from the config alone, without the meta device."""

    weights: tuple[Weight, ...]
    is_formula: bool
    is_tied: bool

    @cached_property
    def count(self) -> int:
        """Parameters."""
        return sum(weight.count for weight in self.weights)

    @cached_property
    def units(self) -> dict[int | str, int]:
        """Parameters of each unit that FSDP gathers at once."""
        units: dict[int | str, int] = {}
        for weight in self.weights:
            units[weight.unit] = units.get(weight.unit, 0) + weight.count
        return units

    @property
    def largest_block(self) -> int:
        """Parameters of the largest block."""
        return max((count for unit, count in self.units.items() if isinstance(unit, int)), default=0)

    @cached_property
    def matrices(self) -> int:
        """Parameters of matrices that a product reads: all of two axes but tables that are only looked up."""
        tables = 0 if self.is_tied else sum(w.count for w in self.weights if w.unit == EMBEDDING)
        tables += sum(w.count for w in self.weights if w.unit == ROOT)
        return sum(w.count for w in self.weights if len(w.shape) == 2) - tables


def shapes_of(config, trust_remote_code: bool = False) -> Shapes:
    """The shapes of the causal LM of a config. ValueError where transformers cannot build it."""
    formula = FORMULAS.get(config.model_type)
    if formula is None:
        return _from_model(config, trust_remote_code)
    return Shapes(tuple(formula(config)), True, bool(config.tie_word_embeddings))


def _hope(config) -> Iterator[Weight]:
    width, tied = config.hidden_size, config.tie_word_embeddings
    yield Weight("model.embed_tokens.weight", (config.vocab_size, width), TAIL if tied else EMBEDDING)
    for index, kind in enumerate(config.layer_types):
        prefix = f"model.layers.{index}"
        yield Weight(f"{prefix}.input_layernorm.weight", (width,), index)
        for name, shape in _MIXERS[kind](config):
            yield Weight(f"{prefix}.mixer.{name}", shape, index)
        for level, hidden in enumerate(config.level_intermediate_sizes):
            own = f"{prefix}.continuum.levels.{level}"
            yield Weight(f"{own}.norm.weight", (width,), index, level)
            yield Weight(f"{own}.gate_proj.weight", (hidden, width), index, level)
            yield Weight(f"{own}.up_proj.weight", (hidden, width), index, level)
            yield Weight(f"{own}.down_proj.weight", (width, hidden), index, level)
        if config.level_variant == "independent":
            yield Weight(f"{prefix}.continuum.mix.weight", (len(config.level_periods),), index)
    yield Weight("model.norm.weight", (width,), TAIL)
    if not tied:
        yield Weight("lm_head.weight", (config.vocab_size, width), TAIL)


def _hope_memories(config) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads, head = config.hidden_size, config.num_memory_heads, config.head_dim
    inner, paper = heads * head, config.memory_rule == "paper"
    shared = config.memory_projections if paper else []
    maps = ["in_proj"] * bool(shared) + [f"{name}_proj" for name in "kv" if name not in shared] + ["q_proj", "g_proj"]
    for name in maps:
        yield f"{name}.weight", (inner, width)
    yield "o_proj.weight", (width, inner)
    for name in "kvq":
        yield f"{name}_conv1d.weight", (inner, 1, config.conv_kernel_size)
    if paper:
        memories = (heads, len(config.memory_projections) + 1, head, head)
        for name in ["inner"] * (config.paper_rule["depth"] == 2) + ["outer"]:
            yield f"initial_memory.{name}", memories
    else:
        yield "initial_memory.weight", (heads, head, head)
        yield "value_share.weight", (heads,)
    has_value_gate = not paper and config.memory_value_gate
    yield "gates.gate_proj.weight", ((3 if has_value_gate else 2) * heads, width)
    for name in ["learning_rate_bias", "dt_bias"] + ["A_log"] * (not paper) + ["value_bias"] * has_value_gate:
        yield f"gates.{name}", (heads,)
    yield "o_norm.weight", (head,)


def _hope_attention(config) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    for name, size in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{name}_proj.weight", (size, config.hidden_size)
        if config.attention_bias:
            yield f"{name}_proj.bias", (size,)
    yield "o_proj.weight", (config.hidden_size, heads)
    if config.attention_bias:
        yield "o_proj.bias", (config.hidden_size,)


def _hope_sparse(config) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, head = config.hidden_size, config.head_dim
    heads, groups = config.num_attention_heads, config.num_key_value_heads
    for name, size in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{name}_proj.weight", (size * head, width)
    yield "branch_proj.weight", (3 * heads, width)
    yield "o_proj.weight", (width, heads * head)
    for name, size in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{name}_conv1d.weight", (size * head, 1, config.conv_kernel_size)
    for name in "qk":
        yield f"{name}_norm.weight", (head,)
    for name in "kv":
        yield f"{name}_compress.weight", (groups, config.sparse_compress_stride, head)


_MIXERS = {"hope_memory": _hope_memories, "sparse_attention": _hope_sparse, "full_attention": _hope_attention}


def _llama(config) -> Iterator[Weight]:
    width, hidden, tied = config.hidden_size, config.intermediate_size, config.tie_word_embeddings
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    heads, groups = config.num_attention_heads * head, config.num_key_value_heads * head
    attention_bias, mlp_bias = getattr(config, "attention_bias", False), getattr(config, "mlp_bias", False)
    yield Weight("model.embed_tokens.weight", (config.vocab_size, width), TAIL if tied else EMBEDDING)
    for index in range(config.num_hidden_layers):
        prefix = f"model.layers.{index}"
        for name, size in (
            ("self_attn.q_proj", (heads, width)), ("self_attn.k_proj", (groups, width)),
            ("self_attn.v_proj", (groups, width)), ("self_attn.o_proj", (width, heads)),
            ("mlp.gate_proj", (hidden, width)), ("mlp.up_proj", (hidden, width)), ("mlp.down_proj", (width, hidden)),
        ):  # fmt: skip
            yield Weight(f"{prefix}.{name}.weight", size, index)
            if attention_bias if name.startswith("self_attn") else mlp_bias:
                yield Weight(f"{prefix}.{name}.bias", size[:1], index)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield Weight(f"{prefix}.{name}.weight", (width,), index)
    yield Weight("model.norm.weight", (width,), TAIL)
    if not tied:
        yield Weight("lm_head.weight", (config.vocab_size, width), TAIL)


def _gpt2(config) -> Iterator[Weight]:
    width, tied = config.n_embd, config.tie_word_embeddings
    hidden = config.n_inner or 4 * width
    yield Weight("transformer.wte.weight", (config.vocab_size, width), TAIL if tied else EMBEDDING)
    yield Weight("transformer.wpe.weight", (config.n_positions, width), ROOT)
    for index in range(config.n_layer):
        prefix = f"transformer.h.{index}"
        for name, columns, rows in (
            ("attn.c_attn", 3 * width, width), ("attn.c_proj", width, width),
            ("mlp.c_fc", hidden, width), ("mlp.c_proj", width, hidden),
        ):  # fmt: skip
            yield Weight(f"{prefix}.{name}.weight", (rows, columns), index)
            yield Weight(f"{prefix}.{name}.bias", (columns,), index)
        for name in ("ln_1", "ln_2"):
            yield Weight(f"{prefix}.{name}.weight", (width,), index)
            yield Weight(f"{prefix}.{name}.bias", (width,), index)
    for name in ("weight", "bias"):
        yield Weight(f"transformer.ln_f.{name}", (width,), TAIL)
    if not tied:
        yield Weight("lm_head.weight", (config.vocab_size, width), TAIL)


FORMULAS = {"hope": _hope, "llama": _llama, "mistral": _llama, "gpt2": _gpt2}


def meta_model(config, trust_remote_code: bool = False):
    """The causal LM of a config on the meta device; ValueError where transformers cannot build it."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except MISTAKES as error:
        raise ValueError(f"--model_type {config.model_type} cannot be built: {one_line(error)}") from error


def _from_model(config, trust_remote_code: bool) -> Shapes:
    model = meta_model(config, trust_remote_code)
    kinds = model._no_split_modules or ()
    names = [name for name, module in model.named_modules() if type(module).__name__ in kinds]
    block_of = {f"{name}.": index for index, name in enumerate(names)}
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    own = [None if table is None else table.weight for table in tables]
    is_tied = own[0] is own[1]

    def unit(name: str, parameter) -> int | str:
        for prefix, index in block_of.items():
            if name.startswith(prefix):
                return index
        if parameter is own[0] and not is_tied:
            return EMBEDDING
        # Vectors outside the blocks belong to the last norm.
        return TAIL if parameter is own[1] or parameter.ndim == 1 else ROOT

    weights = (Weight(name, tuple(p.shape), unit(name, p)) for name, p in model.named_parameters())
    return Shapes(tuple(weights), False, is_tied)
