"""Short convolutions in scans with a backward pass by hand: `memory_scan.convolve`, and its gradients, in place.

Axes: b row, C slot of a piece, X channel, K width of the convolution.
"""

import torch

from .memory_scan import ScanPiece


def convolve_padded(padded: torch.Tensor, taps: torch.Tensor, piece: ScanPiece) -> torch.Tensor:
    """What `memory_scan.convolve` makes [b, C, X] of padded streams."""
    reach = taps.shape[0] - 1
    size = padded.shape[1] - reach
    mixed = taps[reach] * padded[:, reach:]
    for tap in range(reach):
        term = padded[:, tap : tap + size]
        mixed.addcmul_(taps[tap], term if piece.inside is None else term * piece.inside[tap])
    return mixed


def convolution_gradients(
    grad_mixed: torch.Tensor,
    grad_tail: torch.Tensor | None,
    padded: torch.Tensor,
    taps: torch.Tensor,
    grad_taps: torch.Tensor,
    piece: ScanPiece,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the raw streams [b, C, X] and of the tail of the piece before [b, K - 1, X].

    Args:
        grad_mixed: of what `convolve_padded` made of `padded`.
        grad_tail: of the tail for the next piece, or `None` where nothing reads it.
        grad_taps: added to in place.
    """
    reach, size = taps.shape[0] - 1, grad_mixed.shape[1]
    grad_padded = torch.zeros_like(padded)
    for tap in range(reach + 1):
        part = grad_mixed if tap == reach or piece.inside is None else grad_mixed * piece.inside[tap]
        grad_padded[:, tap : tap + size].addcmul_(taps[tap], part)
        grad_taps[tap].add_((part * padded[:, tap : tap + size]).sum_to_size(taps[tap].shape))
    if grad_tail is not None and piece.tail_out is None:
        grad_padded[:, size:].add_(grad_tail)
    elif grad_tail is not None:
        grad_padded.scatter_add_(1, piece.tail_out.expand_as(grad_tail), grad_tail)
    grad_tail = grad_padded[:, :reach]
    if piece.tail_in is not None:
        moved_in = piece.tail_in.expand_as(grad_tail)
        grad_moved = grad_padded.gather(1, moved_in)
        grad_padded.scatter_(1, moved_in, 0.0)
        grad_tail = grad_tail + grad_moved
    return grad_padded[:, reach:], grad_tail
