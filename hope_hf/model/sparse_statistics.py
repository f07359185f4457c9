"""What sparse attention did with the tokens that it read: sums, which add up over calls and processes."""

import torch

# a share above it has chosen one branch
COLLAPSED = 0.95


class SparseStatistics:
    """Sums over all calls since it was made. A mixer fills it while it is its `sparse_statistics`."""

    def __init__(self):
        self._parts: list[dict[str, torch.Tensor]] = []

    @torch.no_grad()
    def add(
        self, gates: torch.Tensor, chosen: torch.Tensor, own: torch.Tensor, valid: torch.Tensor | None, top_k: int
    ) -> None:
        """Add one call.

        Args:
            gates: weights of the branches [B, S, heads, 3]; over their sum they are shares.
            chosen: blocks that were selected [B, H, S, X], -1 for none.
            own: block of each query [B, S].
            valid: slots that hold a token [B, S], or `None` where all do.
            top_k: the most blocks that a query can select.
        """
        valid = torch.ones_like(own, dtype=torch.bool) if valid is None else valid
        gates = gates[valid].double().clamp(min=torch.finfo(torch.float32).tiny)
        shares = gates / gates.sum(-1, keepdim=True)
        entropy = -(shares * shares.log()).sum(-1)
        largest = shares.amax(-1)
        blocks = chosen.transpose(1, 2)[valid]
        is_read = blocks >= 0
        number = is_read.sum(-1)
        away = (own[valid][:, None, None] - blocks)[is_read]
        self._parts.append({
            "gates": torch.tensor(entropy.numel()), "entropy": entropy.sum(), "shares": shares.sum((0, 1)),
            "collapsed": (largest > COLLAPSED).sum(), "rows": torch.tensor(number.numel()), "k": number.sum(),
            "k_at_max": (number == top_k).sum(), "distances": torch.bincount(away),
            "entropy_min": entropy.amin() if entropy.numel() else entropy.new_tensor(torch.inf),
            "gate_max": largest.amax() if largest.numel() else largest.new_tensor(0.0),
            "k_max": number.amax() if number.numel() else torch.tensor(0),
        })  # fmt: skip

    def read(self) -> list[dict]:
        """The sums of each call as numbers and lists."""
        return [{name: value.tolist() for name, value in part.items()} for part in self._parts]
