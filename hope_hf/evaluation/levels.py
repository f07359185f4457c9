"""Texts read with levels that learn: losses of the tokens, and what every step did."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hope_hf import HopeCache

from .result import Row
from .streams import Scores, score


class Piece(NamedTuple):
    """Tokens of B texts that were read between two steps, and what the L levels made of them, on the CPU."""

    # tokens of each text up to the end of the piece
    end: int
    # mean loss of each text [B] in nats: as it was read, and read again with the levels after the steps
    before: Tensor
    after: Tensor
    # steps in this piece, and steps left out by reason [B, L]
    counts: dict[str, Tensor]
    # largest norm of a difference after the piece, relative to that of its matrix [B, L]
    drift: Tensor


@torch.no_grad()
def learned_scores(
    model: PreTrainedModel, input_ids: Tensor, after_piece: Callable[[], None] = lambda: None
) -> tuple[Scores, list[Piece], Tensor]:
    """Scores [B, T-1] of texts from which levels learn, each token before it is learned from; and every full piece.

    A piece in which a level took a step is read again from the state before it, with the levels after the step.

    Args:
        model: a HOPE whose `level_learning` is set.
        input_ids: [B, T]; each row begins a document, and none is padded.
        after_piece: called after every piece.

    Returns:
        The scores, the pieces that ended a period, and the bytes of each level's differences in a text [L].
    """
    period = model.config.level_learning.resolved(model.config).periods[0]
    length = input_ids.shape[1] - 1
    cache = HopeCache(model.config)
    scores, pieces = [], []
    for start in range(0, length, period):
        end = min(start + period, length)
        ids, targets = input_ids[:, start:end].to(model.device), input_ids[:, start + 1 : end + 1]
        before = cache.snapshot()
        found = score(model(ids, cache=cache, learn=True).logits, targets)
        scores.append(found)
        if end - start == period:
            after = cache.snapshot()
            counts = after.levels.counts
            if before.levels is not None:
                counts = {name: number - before.levels.counts[name] for name, number in counts.items()}
            again = found
            if counts["steps"].any():
                cache.rollback(before)
                cache.levels = after.levels
                again = score(model(ids, cache=cache).logits, targets)
                cache.rollback(after)
            counts = {name: number.cpu() for name, number in counts.items()}
            means = [one.losses.mean(1) for one in (found, again)]
            pieces.append(Piece(end, *means, counts, model.level_drifts(cache).cpu()))
        after_piece()
    sizes = torch.zeros(cache.levels.steps.shape[1], dtype=torch.long)
    for key, delta in cache.levels.deltas.items():
        sizes[key.level] += delta[0].nbytes
    return Scores(*(torch.cat(parts, 1) for parts in zip(*scores, strict=True))), pieces, sizes


def joined(batches: list[list[Piece]]) -> list[Piece]:
    """The pieces of several batches of texts of one length, as those of all texts."""
    found = []
    for same in zip(*batches, strict=True):
        counts = {name: torch.cat([piece.counts[name] for piece in same]) for name in same[0].counts}
        before, after, drift = (torch.cat([getattr(p, name) for p in same]) for name in ("before", "after", "drift"))
        found.append(Piece(same[0].end, before, after, counts, drift))
    return found


def level_rows(pieces: list[Piece], edges: list[int], sizes: Tensor) -> list[Row]:
    """A row for every level and bucket of positions that ends at an edge; a piece belongs to the bucket of its end.

    `sizes`: bytes of a text's differences by level [L].
    """
    rows = []
    for start, end in pairwise([0, *edges]):
        inside = [piece for piece in pieces if start < piece.end <= end]
        for level, size in enumerate(sizes.tolist()):
            row: Row = {"positions": f"{start + 1:,}-{end:,}", "level": level}
            for name in ("steps", "skipped_gate", "skipped_not_finite"):
                row[name] = sum(int(piece.counts[name][:, level].sum()) for piece in inside)
            drifts = [float(piece.drift[:, level].max()) for piece in pieces if piece.end <= end]
            row["drift"] = drifts[-1] if drifts else 0.0
            stepped = [piece.counts["steps"][:, level] > 0 for piece in inside]
            for name in ("before", "after"):
                losses = [getattr(piece, name)[rows] for piece, rows in zip(inside, stepped, strict=True)]
                row[f"loss_{name}"] = float(torch.cat(losses).double().mean()) if row["steps"] else None
            rows.append(row | {"state_mib": size / 2**20})
    return rows


def level_panels(pieces: list[Piece]) -> dict[str, dict[str, list]]:
    """Curves over the tokens of a text for `display.small_curves`, as means over texts; a drift is the largest."""
    loss, drift, steps = {}, {}, {}
    panels = {
        "loss of a piece, nats per token": loss,
        "drift: norm of what was learned, % of the matrix": drift,
        "steps so far, mean of the texts": steps,
    }
    totals: dict[str, Tensor] = {}
    names = {"steps": "steps", "skipped_gate": "left out by the gate", "skipped_not_finite": "left out, not finite"}
    for piece in pieces:
        for name, label in (("before", "as it was read"), ("after", "read again after the step")):
            loss.setdefault(label, []).append((piece.end, (float(getattr(piece, name).mean()), None)))
        for level in range(piece.drift.shape[1]):
            percent = 100 * float(piece.drift[:, level].max())
            drift.setdefault(f"level {level}", []).append((piece.end, (percent, None)))
        for name, label in names.items():
            totals[name] = totals.get(name, 0) + piece.counts[name].double().mean(0)
            for level, total in enumerate(totals[name].tolist()):
                steps.setdefault(f"level {level}: {label}", []).append((piece.end, (total, None)))
    # a reason that never came is not drawn
    panels["steps so far, mean of the texts"] = {
        label: points for label, points in steps.items() if label.endswith("steps") or points[-1][1][0]
    }
    return panels
