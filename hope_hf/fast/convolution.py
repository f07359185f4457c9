"""The short convolution of `layers.convolve` in place, and its gradients written by hand.

Axes: b row, C slot of a span, X channel, K kernel size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model.chunks import ChunkSpan


def convolve_padded(
    padded: Sequence[Tensor],
    conv_weights: Sequence[Sequence[Tensor]],
    span: ChunkSpan,
    out: Sequence[Tensor],
) -> None:
    """The convolution of `convolve`, of streams with their tails in front [b, K - 1 + C, X], into `out` [b, C, X]."""
    for inputs, weights, mixed in zip(padded, conv_weights, out, strict=True):
        tail_size = len(weights) - 1
        length = mixed.shape[1]
        newest = inputs[:, tail_size:]
        torch.mul(weights[tail_size], newest, out=mixed)
        for k in range(tail_size):
            earlier = inputs[:, k : k + length]
            if span.inside is not None:
                earlier = earlier * span.inside[k]
            mixed.addcmul_(weights[k], earlier)


def convolution_gradients(
    grad_mixed: Tensor,
    grad_tail: Tensor | None,
    padded: Tensor,
    conv_weights: Sequence[Tensor],
    grad_conv_weights: Sequence[Tensor],
    span: ChunkSpan,
) -> tuple[Tensor, Tensor]:
    """Gradients of the span's inputs [b, C, X] and of the tail before it [b, K - 1, X].

    Args:
        grad_mixed: gradient of `convolve_padded` of one stream.
        grad_tail: gradient of the tail for the next span, or `None` if nothing reads it.
        grad_conv_weights: gradients of the weights, added to in place.
    """
    tail_size = len(conv_weights) - 1
    length = grad_mixed.shape[1]
    grad_padded = torch.empty_like(padded)
    grad_padded[:, :tail_size].zero_()
    grad_newest = grad_padded[:, tail_size:]
    torch.mul(conv_weights[tail_size], grad_mixed, out=grad_newest)
    product = torch.empty_like(grad_mixed)
    for k in range(tail_size + 1):
        inputs = slice(k, k + length)
        grad_term = grad_mixed
        if k < tail_size:
            if span.inside is not None:
                grad_term = grad_mixed * span.inside[k]
            grad_padded[:, inputs].addcmul_(conv_weights[k], grad_term)
        torch.mul(grad_term, padded[:, inputs], out=product)
        grad_weight = product.sum_to_size(conv_weights[k].shape)
        grad_conv_weights[k].add_(grad_weight)
    if grad_tail is not None:
        _add_tail_after(grad_padded, grad_tail, span)
    grad_tail_before = grad_padded[:, :tail_size]
    if span.tail_in is not None:
        # the tail stood once more, right before the first token
        copies = span.tail_in.expand_as(grad_tail_before)
        grad_copies = grad_padded.gather(1, copies)
        grad_padded.scatter_(1, copies, 0.0)
        grad_tail_before = grad_tail_before + grad_copies
    return grad_newest, grad_tail_before


def _add_tail_after(
    grad_padded: Tensor,
    grad_tail: Tensor,
    span: ChunkSpan,
) -> None:
    """Add the gradient of `layers.tail_after` [b, K - 1, X] to that of the padded inputs [b, K - 1 + C, X]."""
    if span.tail_out is None:
        first = grad_padded.shape[1] - grad_tail.shape[1]
        grad_padded[:, first:].add_(grad_tail)
    else:
        index = span.tail_out.expand_as(grad_tail)
        grad_padded.scatter_add_(1, index, grad_tail)
