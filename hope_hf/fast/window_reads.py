"""Reads of attention with a window, with gradients written by hand.

Autograd makes a gradient of all keys of a call for every band of queries, and adds these up. Here a band adds to the
gradients of the keys that it sees, and keys that earlier calls left get none.

Axes: B row, T query, H head of keys, G query heads that share it, D head width; M keys of a call.
"""

import torch
from torch import Tensor

from ..model.backends import once_differentiable
from ..model.streams import Streams, take
from ..model.window_attention import read_band
from ..model.window_plan import Band


class _WindowReads(torch.autograd.Function):
    """What the queries of all bands read [B, heads, T, D]."""

    @staticmethod
    def forward(ctx, queries, sink_queries, keys, values, bands, constant_keys):
        streams = Streams(queries, sink_queries, keys, values)
        reads = []
        weights = []
        for band in bands:
            reads_of_band, weights_of_band = read_band(streams, keys, values, band)
            reads.append(reads_of_band)
            weights.append(weights_of_band)
        ctx.save_for_backward(*streams, *weights)
        ctx.bands = bands
        ctx.constant_keys = constant_keys
        return torch.cat(reads, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_reads):
        queries, sink_queries, keys, values, *weights = ctx.saved_tensors
        streams = Streams(queries, sink_queries, keys, values)
        grad_sink_queries = None
        if sink_queries is not None:
            grad_sink_queries = torch.zeros_like(sink_queries)
        gradients = Streams(
            queries=torch.empty_like(queries),
            sink_queries=grad_sink_queries,
            keys=torch.zeros_like(keys),
            values=torch.zeros_like(values),
        )
        # from the last band on, as autograd adds them
        for band, weights_of_band in zip(reversed(ctx.bands), reversed(weights), strict=True):
            _add_gradients(streams, gradients, grad_reads, band, weights_of_band, ctx.constant_keys)
        return (*gradients, None, None)


def _add_gradients(
    streams: Streams,
    gradients: Streams,
    grad_reads: Tensor,
    band: Band,
    weights: Tensor,
    constant: int,
) -> None:
    """Add a band's gradients to those of the call, from that of all reads [B, heads, T, D].

    Args:
        weights: of the keys that the band sees [B H, G q, k], the sinks' first.
        constant: number of first keys that need no gradient.
    """
    _, _, keys, values = streams
    window = band.window_keys
    sinks = band.sinks
    seen_values = take(values, window)
    number_of_sinks = 0
    if sinks is not None:
        sink_values = take(values, sinks)
        seen_values = torch.cat([sink_values, seen_values], dim=2)
        # a short text has fewer
        number_of_sinks = sink_values.shape[2]
        sinks = slice(number_of_sinks)
    window_columns = slice(number_of_sinks, None)
    grad_band = _asked(grad_reads, band, keys)
    values_of_heads = seen_values.flatten(0, 1)
    grad_weights = torch.bmm(grad_band, values_of_heads.mT)
    grad_scores = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
    # Sinks may be in the window, too: products are added in autograd's order.
    if sinks is not None:
        grad_sink_scores = take(grad_scores, sinks)
        sink_keys = take(keys, sinks)
        sink_queries = _asked(streams.sink_queries, band, keys)
        _set_queries(gradients.sink_queries, band, grad_sink_scores, sink_keys)
        _add_to_keys(gradients.keys, grad_sink_scores, sink_queries, 0, constant)
    grad_window_scores = take(grad_scores, window_columns)
    window_weights = take(weights, window_columns)
    window_keys = take(keys, window)
    queries = _asked(streams.queries, band, keys)
    _set_queries(gradients.queries, band, grad_window_scores, window_keys)
    _add_to_keys(gradients.keys, grad_window_scores, queries, window.start, constant)
    _add_to_keys(gradients.values, window_weights, grad_band, window.start, constant)
    if sinks is not None:
        sink_weights = take(weights, sinks)
        _add_to_keys(gradients.values, sink_weights, grad_band, 0, constant)


def _asked(x: Tensor, band: Band, keys: Tensor) -> Tensor:
    """A band's part of [B, heads, T, D], in the order of the heads of keys [B H, G q, D]."""
    rows, key_heads, _, width = keys.shape
    asked = take(x, band.queries)
    return asked.reshape(rows * key_heads, -1, width)


def _set_queries(gradient: Tensor, band: Band, grad_scores: Tensor, keys: Tensor) -> None:
    """Write a band's part of a gradient [B, heads, T, D], from that of scores [B H, G q, k] of keys [B, H, k, D]."""
    keys_of_heads = keys.flatten(0, 1)
    products = torch.bmm(grad_scores, keys_of_heads)
    asked = take(gradient, band.queries)
    asked.copy_(products.view_as(asked))


def _add_to_keys(gradient: Tensor, factors: Tensor, operand: Tensor, start: int, constant: int) -> None:
    """Add a band's products to a gradient [B, H, M, D] at its keys, except the first `constant` of all.

    Args:
        factors: of the band's keys [B H, G q, k], which begin at key `start`.
        operand: [B H, G q, D].
    """
    first = max(start, constant)
    stop = start + factors.shape[2]
    if first >= stop:
        return
    learning = factors[:, :, first - start :]
    products = torch.bmm(learning.mT, operand)
    gradient_of_keys = gradient[:, :, first:stop]
    gradient_of_keys += products.view_as(gradient_of_keys)


def read_bands_for_training(
    streams: Streams,
    keys: Tensor,
    values: Tensor,
    bands: tuple[Band, ...],
    constant_keys: int,
) -> Tensor | None:
    """Reads of all bands [B, heads, T, D] in training on a CPU; `None` where autograd has to make the gradients.

    The gradients have no gradients.

    Args:
        streams: whose keys and values are of the call's own tokens.
        keys, values: of earlier calls, then of this one [B, H, M, D].
        bands: of the call's queries.
        constant_keys: number of first keys that need no gradient.
    """
    queries = streams.queries
    if not queries.is_cpu or not queries.requires_grad:
        return None
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    for band in bands:
        # rows whose sinks lie in different places
        if isinstance(band.sinks, Tensor):
            return None
    return _WindowReads.apply(queries, streams.sink_queries, keys, values, bands, constant_keys)
