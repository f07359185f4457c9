"""One token of the delta rule without gradients: generation. No solve, no masks, every weight read once."""

import torch

from .delta_rule import DeltaMemories
from .memory_scan import ScanInputs, ScanPiece, ScanState, close_piece, make_streams, restart, unit, written_values


@torch.no_grad()
def step_token(
    inputs: ScanInputs, memories: DeltaMemories, state: ScanState, piece: ScanPiece
) -> tuple[torch.Tensor, ScanState]:
    """`memory_scan.scan_piece` of a piece of one token: reads [b, 1, D], and the state after it."""
    initial, width = memories.initial, inputs.query.shape[-1]
    state = restart(memories, state, piece)
    key, value, query, tail = make_streams(inputs, memories, state, piece)
    value = written_values(inputs, value, piece)
    (current,) = state.current
    pair = unit(torch.cat([key, query], dim=1))
    key, query = pair.split(1, dim=1)
    retention = inputs.log_retention.exp().unsqueeze(-1)
    # k W' and q W' with the decayed weights W' = W_0 + alpha S
    held = retention * torch.bmm(pair, current)
    held[..., -width:] += torch.bmm(pair, initial)
    errors = value.repeat(1, 1, len(memories.rate_factors)).sub_(held[:, :1])
    errors[..., :-width] -= key.repeat(1, 1, len(memories.remade))
    rates = torch.cat([factor * inputs.rate.expand(-1, width) for factor in memories.rate_factors], dim=-1)
    errors.mul_(rates.unsqueeze(1))
    reads = held[:, 1:, -width:] + (query * key).sum(-1, keepdim=True) * errors[..., -width:]
    reads.addcmul_(memories.value_share, value)
    after = (torch.baddbmm(retention * current, key.mT, errors),)
    return reads, close_piece(state, piece, after, tail)
