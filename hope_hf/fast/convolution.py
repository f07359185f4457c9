"""The short convolution of `layers.convolve` in place, and its gradients written by hand.

Axes: b row, C slot of a span, X channel, K kernel size.
"""

from collections.abc import Sequence

import torch

from ..model.chunks import ChunkSpan


def convolve_padded(
    padded: Sequence[torch.Tensor],
    conv_weights: Sequence[Sequence[torch.Tensor]],
    span: ChunkSpan,
    out: Sequence[torch.Tensor],
) -> None:
    """The convolution of `convolve`, of streams with their tails in front [b, K - 1 + C, X], into `out` [b, C, X]."""
    for stream, weights, mixed in zip(padded, conv_weights, out, strict=True):
        tail_size, size = len(weights) - 1, mixed.shape[1]
        torch.mul(weights[tail_size], stream[:, tail_size:], out=mixed)
        for k in range(tail_size):
            term = stream[:, k : k + size]
            mixed.addcmul_(weights[k], term if span.inside is None else term * span.inside[k])


def convolution_gradients(
    grad_mixed: torch.Tensor,
    grad_tail: torch.Tensor | None,
    padded: torch.Tensor,
    conv_weights: Sequence[torch.Tensor],
    grad_conv_weights: Sequence[torch.Tensor],
    span: ChunkSpan,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the span's inputs [b, C, X] and of the tail before it [b, K - 1, X].

    Args:
        grad_mixed: gradient of `convolve_padded` of one stream.
        grad_tail: gradient of the tail for the next span, or `None` if nothing reads it.
        grad_conv_weights: gradients of the weights, added to in place.
    """
    tail_size, size = len(conv_weights) - 1, grad_mixed.shape[1]
    grad_padded, product = torch.empty_like(padded), torch.empty_like(grad_mixed)
    grad_padded[:, :tail_size].zero_()
    torch.mul(conv_weights[tail_size], grad_mixed, out=grad_padded[:, tail_size:])
    for k in range(tail_size + 1):
        part = grad_mixed if k == tail_size or span.inside is None else grad_mixed * span.inside[k]
        if k < tail_size:
            grad_padded[:, k : k + size].addcmul_(conv_weights[k], part)
        torch.mul(part, padded[:, k : k + size], out=product)
        grad_conv_weights[k].add_(product.sum_to_size(conv_weights[k].shape))
    if grad_tail is not None and span.tail_out is None:
        grad_padded[:, size:].add_(grad_tail)
    elif grad_tail is not None:
        grad_padded.scatter_add_(1, span.tail_out.expand_as(grad_tail), grad_tail)
    grad_tail = grad_padded[:, :tail_size]
    if span.tail_in is not None:
        moved_in = span.tail_in.expand_as(grad_tail)
        grad_moved = grad_padded.gather(1, moved_in)
        grad_padded.scatter_(1, moved_in, 0.0)
        grad_tail = grad_tail + grad_moved
    return grad_padded[:, tail_size:], grad_tail
