"""Bytes of a step's parts by the shapes of the weights alone, for architectures that do not run on fake tensors."""

from collections import Counter

from hope_hf.common.recompute import MIXERS
from hope_hf.common.recompute_flag import Recomputed

from .allocations import Block, Ends
from .launch import Mode
from .shapes import TAIL, Shapes

# Bytes per token and vocabulary entry in the loss's backward pass: the log-softmax, its gradient and the gradient of
# its input, all fp32.
LOSS_BYTES = 12


def estimated_blocks(shapes: Shapes, mode: Mode, width: int, tokens: int, recomputed: Recomputed) -> list[Block]:
    """The blocks of a batch of `tokens` tokens: each matrix keeps its input and its output."""
    low = mode.low_bytes
    bytes_of_weight = 2 if mode.dtype else 4
    kept: Counter[int] = Counter()
    of_mixers: Counter[int] = Counter()
    copies: Counter[int] = Counter()
    weights: Counter[int] = Counter()
    for weight in shapes.weights:
        if not weight.is_in_block:
            continue
        weights[weight.unit] += weight.count
        if len(weight.shape) == 2:
            size = tokens * low * sum(weight.shape)
            kept[weight.unit] += size
            if not MIXERS.isdisjoint(weight.name.split(".")):
                of_mixers[weight.unit] += size
            if low < bytes_of_weight:
                copies[weight.unit] += low * weight.count
    blocks = []
    for unit in sorted(weights):
        whole = kept[unit] + copies[unit]
        stays = whole
        if recomputed.part == "mixer":
            stays -= of_mixers[unit]
        elif recomputed.part == "block" and unit % recomputed.every == 0:
            stays = low * tokens * width
        gradients = bytes_of_weight * weights[unit]
        # A quarter of what the block keeps for gradients of activations.
        peak = whole + kept[unit] // 4
        blocks.append(
            Block(
                forward=whole,
                inside=stays,
                kept=stays,
                input=0,
                shared=0,
                backward=(peak, peak // 2),
                end=low * tokens * width,
                gradients=(0, gradients),
            )
        )
    return blocks


def estimated_ends(shapes: Shapes, mode: Mode, width: int, vocabulary: int, tokens: int) -> Ends:
    """The ends of a batch: whole logits, and the gradient of the head."""
    low = mode.low_bytes
    bytes_of_weight = 2 if mode.dtype else 4
    in_blocks = sum(weight.count for weight in shapes.weights if weight.is_in_block)
    gradients = bytes_of_weight * (shapes.count - in_blocks)
    # A tied table has its gradient when the embedding has run backward.
    of_head = 0 if shapes.is_tied else bytes_of_weight * shapes.units[TAIL]
    hidden_states = low * tokens * width
    logits = vocabulary * tokens * LOSS_BYTES
    return Ends(
        inside=hidden_states,
        kept=hidden_states,
        forward=hidden_states + logits,
        outside=hidden_states + logits,
        head=hidden_states + logits,
        loss=(hidden_states + logits, 2 * hidden_states),
        end=2 * hidden_states,
        carried=0,
        last=(hidden_states, 0),
        loss_gradients=(0, of_head),
        last_gradients=(of_head, gradients),
    )
