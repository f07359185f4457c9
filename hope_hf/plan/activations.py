"""Bytes that a causal LM keeps: the activations of each block from forward to backward, and the state of a sequence.

The formulas read the config. Each term is one tensor that autograd saves; tests compare the sums with the simulated
step. Attention is sdpa or flash attention, whose kernels never hold heads x tokens^2 numbers. Three modes differ:

- fp32: every number has 4 bytes.
- autocast (bf16 or fp16 in one process, under DDP and DeepSpeed): the residual stream and norms stay fp32; every
  linear layer casts its own input and keeps a 2-byte copy of its weights.
- cast (FSDP): blocks have 2-byte weights and inputs.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from hope_hf.common.recompute import MIXERS
from hope_hf.common.recompute_flag import Recomputed

from .launch import Launch
from .shapes import Shapes

# Bytes per token and vocabulary entry in the loss's backward pass: the log-softmax, its gradient and the gradient of
# its input, all fp32.
LOSS_BYTES = 12
# Tensors that transformers' GELU in plain operations saves: input, half the input, tanh, 1 + tanh and the product.
GELU_TENSORS = 5


@dataclass(frozen=True)
class Mode:
    """How numbers are stored.

    Attributes:
        stream: bytes of a number of the residual stream.
        low: bytes of a number that a matrix is multiplied with.
    """

    stream: int
    low: int

    @property
    def is_autocast(self) -> bool:
        return self.low < self.stream

    def norm(self, width: int, is_fused: bool = False) -> int:
        """Bytes per token: input, normalised input and output of an RMS norm; fused, without the normalised input."""
        # Under autocast the linear layers that read the output keep their casts instead.
        kept = 12 if self == FP32 else 8
        if is_fused and self != CAST:
            kept -= 4
        return kept * width

    def casts(self, width: int, readers: int) -> int:
        """Bytes per token: casts of an input that `readers` linear layers read."""
        return 2 * width * readers if self.is_autocast else 0

    def block(self, width: int, tokens: int, rest: int, mixer: int, of_batch: int = 0) -> "Block":
        """A block whose mixer reads a norm's output; `rest`, `mixer`: bytes per token; `of_batch`: the mixer's."""
        mixer_input = 4 * width if self.is_autocast else 0
        return Block(tokens * rest, tokens * mixer + of_batch, tokens * mixer_input)


FP32, AUTOCAST, CAST = Mode(4, 4), Mode(4, 2), Mode(2, 2)


@dataclass(frozen=True)
class Block:
    """Bytes that a block keeps: its sequence mixer, and the rest of the block.

    Attributes:
        mixer_input: the mixer's input, also kept if the mixer is recomputed; `rest` does not include it.
    """

    rest: int
    mixer: int
    mixer_input: int = 0

    @property
    def whole(self) -> int:
        return self.rest + self.mixer


@dataclass(frozen=True)
class Activations:
    """Bytes of one forward pass of one process.

    Attributes:
        blocks: all blocks, as they are kept for the backward pass.
        one_block: the largest block without recomputation.
        in_backward: largest sum over the backward pass of the blocks still kept and the block that is recomputed.
        loss: those of the last norm, the logits and their gradients.
        weight_copies: the low-precision copies of weights that autocast keeps.
        is_estimate: whether no formula below describes the architecture's blocks.
    """

    blocks: int
    one_block: int
    in_backward: int
    loss: int
    weight_copies: int
    is_estimate: bool


def mode_of(launch: Launch) -> Mode:
    """The mode of a launch."""
    if launch.precision == "no":
        return FP32
    return CAST if launch.strategy.is_fsdp and launch.strategy.gathers else AUTOCAST


def activations(
    config, shapes: Shapes, launch: Launch, batch_size: int, block_size: int, recomputed: Recomputed
) -> Activations:
    """The activations of a batch; a `recomputed` part keeps only its inputs."""
    mode = mode_of(launch)
    tokens = batch_size * block_size
    width = getattr(config, "n_embd", None) or config.hidden_size
    formula = FORMULAS.get(config.model_type, partial(_by_matrices, shapes))
    kept = in_backward = one_block = 0
    for index, block in enumerate(formula(config, mode, batch_size, block_size)):
        kept_of_block = block.whole
        again = 0
        if recomputed.part == "mixer":
            kept_of_block = block.rest + block.mixer_input
            again = block.mixer
        elif recomputed.part == "block" and index % recomputed.every == 0:
            kept_of_block = tokens * width * mode.stream
            again = block.whole
        kept += kept_of_block
        in_backward = max(in_backward, kept + again)
        one_block = max(one_block, block.whole)
    return Activations(
        blocks=kept,
        one_block=one_block,
        in_backward=in_backward,
        loss=_loss(config, mode, width, tokens),
        weight_copies=2 * shapes.matrices if mode.is_autocast else 0,
        is_estimate=config.model_type not in FORMULAS,
    )


def _loss(config, mode: Mode, width: int, tokens: int) -> int:
    """Bytes of the last norm, the logits and their gradients."""
    norm = tokens * width * (2 * 4 + mode.low)
    if config.model_type != "hope":
        return norm + config.vocab_size * LOSS_BYTES * tokens
    # No whole logits: the head's gradient, and the logits of a chunk with their normalisation in fp32.
    chunk = min(width // 2, tokens)
    bytes_of_logit = 8 if mode == FP32 else 6
    return norm + config.vocab_size * (4 * width + chunk * bytes_of_logit)


def _llama(config, mode: Mode, batch_size: int, block_size: int) -> list[Block]:
    width = config.hidden_size
    # Of all heads together.
    query_width = config.num_attention_heads * _head_dim(config)
    key_width = config.num_key_value_heads * _head_dim(config)
    # Casts for three projections; queries, keys, values and output of attention, and the sums of its softmax.
    mixer = mode.casts(width, readers=3)
    mixer += mode.low * 2 * (query_width + key_width)
    mixer += 4 * config.num_attention_heads
    rest = 2 * mode.norm(width)
    rest += mode.casts(width, readers=2)
    rest += mode.low * 4 * config.intermediate_size
    return [mode.block(width, batch_size * block_size, rest, mixer)] * config.num_hidden_layers


def _gpt2(config, mode: Mode, batch_size: int, block_size: int) -> list[Block]:
    width = config.n_embd
    hidden = config.n_inner or 4 * width
    dropped = width if config.resid_pdrop else 0
    # Under autocast the cast of the norm's output is kept by the linear layer that reads it.
    cast = mode.casts(width, readers=1)
    # One tensor of query, key and value; contiguous copies of query and key; attention's output twice.
    mixer = mode.low * 6 * width
    mixer += 4 * config.n_head
    mixer += dropped + cast
    rest = 2 * width * (mode.stream + mode.low)
    rest += mode.low * GELU_TENSORS * hidden
    rest += dropped - cast
    return [mode.block(width, batch_size * block_size, rest, mixer)] * config.n_layer


def _hope(config, mode: Mode, batch_size: int, block_size: int) -> list[Block]:
    width = config.hidden_size
    norm = mode.norm(width, is_fused=True)
    rest = norm
    for hidden in config.level_intermediate_sizes:
        rest += norm + mode.casts(width, readers=2)
        rest += mode.low * 4 * hidden
    if config.levels_class.keeps_outputs:
        # Parallel levels keep their outputs for the gradient of the mixing weights.
        rest += mode.low * width * len(config.level_periods)
    blocks = []
    for mixer in config.mixers:
        casts = mode.casts(width, mixer.input_readers)
        of_batch = mixer.kept_bytes(config, batch_size, block_size, mode.low)
        blocks.append(mode.block(width, batch_size * block_size, rest, casts, of_batch))
    return blocks


Formula = Callable[[object, Mode, int, int], list[Block]]
FORMULAS: dict[str, Formula] = {"hope": _hope, "llama": _llama, "mistral": _llama, "gpt2": _gpt2}


def _by_matrices(shapes: Shapes, config, mode: Mode, batch_size: int, block_size: int) -> list[Block]:
    """An estimate for other architectures: the input and the output of every matrix."""
    tokens = batch_size * block_size
    rest = Counter()
    mixers = Counter()
    for weight in shapes.weights:
        if weight.is_in_block and len(weight.shape) == 2:
            is_of_mixer = not MIXERS.isdisjoint(weight.name.split("."))
            sizes = mixers if is_of_mixer else rest
            sizes[weight.unit] += tokens * mode.low * sum(weight.shape)
    return [Block(rest[index], mixers[index]) for index in sorted(rest | mixers)]


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def cache_bytes(config, tokens: int) -> int | None:
    """Bytes of one sequence's fp32 state after `tokens` tokens: HOPE's states, or keys and values.

    None for other architectures with layers that are no attention.
    """
    if config.model_type == "hope":
        return sum(mixer.cache_bytes(config, tokens) for mixer in config.mixers)
    window = getattr(config, "sliding_window", None)
    tokens_of = {"full_attention": tokens, "sliding_attention": min(tokens, window or tokens)}
    every = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    if not hasattr(config, "num_attention_heads") or not tokens_of.keys() >= set(kinds):
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    # A key and a value in fp32.
    bytes_of_token = 2 * 4 * heads * _head_dim(config)
    return bytes_of_token * sum(map(tokens_of.get, kinds))
