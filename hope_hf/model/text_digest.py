"""Which tokens a cache has read, as one number a row: enough to see whether a text begins with them.

The digest of a row is a polynomial of its token ids modulo 2^64, so that it can be extended call by call:
`digest_{t+1} = BASE (digest_t + id_t)`, from 1. The digest 0 means that the tokens are not known.

Axes: B sequence in batch, T token of the call.
"""

import torch

_BASE = 6364136223846793005


def extend_digest(digest: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
    """The digest [B] of all tokens read after `input_ids` [B, T], from that before them [B]; int64.

    Unknown where it was unknown before, and everywhere if the text is given as embeddings (`None`).
    """
    if input_ids is None:
        return torch.zeros_like(digest)
    # BASE^T to BASE^1; products and sums wrap around
    powers = torch.full((input_ids.shape[1],), _BASE, device=digest.device).cumprod(0).flip(0)
    extended = digest * powers[0] + (input_ids.long() * powers).sum(1)
    return torch.where(digest == 0, 0, extended)


def begins_with(input_ids: torch.Tensor, digest: torch.Tensor, length: int) -> bool:
    """Whether rows [B, T] begin with the `length` tokens of `digest` [B or a multiple]; any do where it is unknown."""
    rows = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    found = extend_digest(rows, input_ids[:, :length])
    # one row of a text for all beams or samples that go on from it
    found = found.repeat_interleave(max(1, len(digest) // len(found))).to(digest.device)
    return len(found) == len(digest) and bool(((digest == 0) | (digest == found)).all())
