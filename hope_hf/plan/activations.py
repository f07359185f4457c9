"""Bytes that a causal LM keeps: the activations of each block from forward to backward, and the state of a sequence.

The formulas read the config. Each term is one tensor that autograd saves; tests compare the sums with the simulated
step. Attention is sdpa or flash attention, whose kernels never hold heads x tokens^2 numbers. Three modes differ:

- fp32: every number has 4 bytes.
- autocast (bf16 or fp16 in one process, under DDP and DeepSpeed): the residual stream and norms stay fp32; every
  linear layer casts its own input and keeps a 2-byte copy of its weights.
- cast (FSDP): blocks have 2-byte weights and inputs.
"""

from dataclasses import dataclass
from typing import Literal

from hope_hf.common.recompute import MIXERS, Recomputed

from .launch import Launch
from .shapes import Shapes

Mode = Literal["fp32", "autocast", "cast"]
# By mode, bytes of a number of the residual stream, and of a number that a matrix is multiplied with.
STREAM = {"fp32": 4, "autocast": 4, "cast": 2}
LOW = {"fp32": 4, "autocast": 2, "cast": 2}
# Bytes per token and vocabulary entry in the loss's backward pass: the log-softmax, its gradient and the gradient of
# its input, all fp32.
LOSS_BYTES = 12
# Tensors that transformers' GELU in plain operations saves: input, half the input, tanh, 1 + tanh and the product.
GELU_TENSORS = 5


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
        return "fp32"
    return "cast" if launch.strategy.engine.startswith("fsdp") and launch.strategy.gathers else "autocast"


def activations(
    config, shapes: Shapes, launch: Launch, batch_size: int, block_size: int, recomputed: Recomputed
) -> Activations:
    """The activations of a batch; a `recomputed` part keeps only its inputs."""
    mode, tokens = mode_of(launch), batch_size * block_size
    low = LOW[mode]
    width = getattr(config, "n_embd", None) or config.hidden_size
    layers = {"hope": _hope, "llama": _llama, "mistral": _llama, "gpt2": _gpt2}.get(config.model_type)
    if layers is None:
        blocks = _by_matrices(shapes, tokens, low)
    else:
        blocks = layers(config, mode, batch_size, block_size)
    inputs = tokens * width * STREAM[mode]
    kept = in_backward = 0
    for index, block in enumerate(blocks):
        again = 0
        if recomputed.part == "mixer":
            kept, again = kept + block.rest + block.mixer_input, block.mixer
        elif recomputed.part == "block" and index % recomputed.every == 0:
            kept, again = kept + inputs, block.whole
        else:
            kept += block.whole
        in_backward = max(in_backward, kept + again)
    loss = tokens * width * (2 * 4 + low)
    if config.model_type == "hope":
        loss += config.vocab_size * _loss_without_logits(width, tokens, mode)
    else:
        loss += config.vocab_size * LOSS_BYTES * tokens
    copies = 2 * shapes.matrices if mode == "autocast" else 0
    one_block = max((block.whole for block in blocks), default=0)
    return Activations(kept, one_block, in_backward, loss, copies, layers is None)


def _loss_without_logits(width: int, tokens: int, mode: Mode) -> int:
    """Bytes per vocabulary entry: the head's gradient, and the logits of a chunk with their normalisation in fp32."""
    return 4 * width + min(width // 2, tokens) * (8 if mode == "fp32" else 6)


def _norm(width: int, mode: Mode, fused: bool = False) -> int:
    """Bytes per token: input, normalised input and output of an RMS norm; fused, without the normalised input."""
    # Under autocast the linear layers that read the output keep their casts instead.
    kept = 12 * width if mode == "fp32" else 8 * width
    return kept - 4 * width if fused and mode != "cast" else kept


def _casts(width: int, mode: Mode, readers: int) -> int:
    """Bytes per token: casts of an input that `readers` linear layers read."""
    return 2 * width * readers if mode == "autocast" else 0


def _llama(config, mode: Mode, batch_size: int, block_size: int) -> list[Block]:
    width, low = config.hidden_size, LOW[mode]
    head = getattr(config, "head_dim", None) or width // config.num_attention_heads
    heads, groups = config.num_attention_heads * head, config.num_key_value_heads * head
    attention = _casts(width, mode, 3) + low * (2 * heads + 2 * groups) + 4 * config.num_attention_heads
    rest = 2 * _norm(width, mode) + _casts(width, mode, 2) + low * 4 * config.intermediate_size
    return [_block(width, mode, batch_size * block_size, rest, attention)] * config.num_hidden_layers


def _block(width: int, mode: Mode, tokens: int, rest: int, attention: int, scan: int = 0) -> Block:
    """A block whose mixer reads a norm's output; `rest`, `attention`: bytes per token; `scan`: per batch."""
    return Block(tokens * rest, tokens * attention + scan, tokens * 4 * width if mode == "autocast" else 0)


def _gpt2(config, mode: Mode, batch_size: int, block_size: int) -> list[Block]:
    width, low = config.n_embd, LOW[mode]
    hidden = config.n_inner or 4 * width
    # Under autocast the cast of the norm's output is kept by the linear layer that reads it.
    norms = 2 * width * (STREAM[mode] + low)
    cast = _casts(width, mode, 1)
    # Kept: one tensor of query, key and value; contiguous copies of query and key; attention's output twice.
    attention = low * width * 6 + 4 * config.n_head
    mask = width if config.resid_pdrop else 0
    rest = norms - cast + low * GELU_TENSORS * hidden + mask
    return [_block(width, mode, batch_size * block_size, rest, attention + mask + cast)] * config.n_layer


def _hope(config, mode: Mode, batch_size: int, block_size: int) -> list[Block]:
    tokens, width, low = batch_size * block_size, config.hidden_size, LOW[mode]
    norm = _norm(width, mode, fused=True)
    rest = norm + sum(norm + _casts(width, mode, 2) + low * 4 * hidden for hidden in config.level_intermediate_sizes)
    # Parallel levels keep their outputs for the gradient of the mixing weights.
    rest += low * width * len(config.level_periods) if config.levels.keeps_outputs else 0
    blocks = {}
    for mixer in set(config.mixers):
        kept = mixer.kept_bytes(config, batch_size, block_size, low)
        blocks[mixer] = _block(width, mode, tokens, rest, _casts(width, mode, mixer.input_readers), kept)
    return [blocks[mixer] for mixer in config.mixers]


def _by_matrices(shapes: Shapes, tokens: int, low: int) -> list[Block]:
    """An estimate for other architectures: the input and the output of every matrix."""
    sizes: dict[int, list[int]] = {}
    for weight in shapes.weights:
        if isinstance(weight.unit, int) and len(weight.shape) == 2:
            in_mixer = not MIXERS.isdisjoint(weight.name.split("."))
            sizes.setdefault(weight.unit, [0, 0])[in_mixer] += tokens * low * sum(weight.shape)
    return [Block(*size) for size in sizes.values()]


def cache_bytes(config, tokens: int) -> int | None:
    """Bytes of one sequence's fp32 state after `tokens` tokens: HOPE's states, or keys and values.

    None for other architectures with layers that are no attention.
    """
    if config.model_type == "hope":
        return sum(mixer.cache_bytes(config, tokens) for mixer in config.mixers)
    window = getattr(config, "sliding_window", None)
    read = {"full_attention": tokens, "sliding_attention": min(tokens, window or tokens)}
    every = "sliding_attention" if window else "full_attention"
    kinds = getattr(config, "layer_types", None) or [every] * config.num_hidden_layers
    if not hasattr(config, "num_attention_heads") or not read.keys() >= set(kinds):
        return None
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 4 * 2 * heads * head * sum(read[kind] for kind in kinds)
