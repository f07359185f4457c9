"""Texts read with levels that learn: losses of the tokens, and what every step did."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hope_hf import HopeCache

from .display import Panels
from .result import Row
from .streams import Scores, joined_scores, score

# Kinds of counts, and their names in a picture.
COUNTS = {"steps": "steps", "skipped_gate": "left out by the gate", "skipped_not_finite": "left out, not finite"}


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
    learning = model.config.level_learning.resolved(model.config)
    period = learning.periods[0]
    length = input_ids.shape[1] - 1
    cache = HopeCache(model.config)
    scores = []
    pieces = []
    for start in range(0, length, period):
        end = min(start + period, length)
        ids = input_ids[:, start:end].to(model.device)
        targets = input_ids[:, start + 1 : end + 1]
        before = cache.snapshot()
        logits = model(ids, cache=cache, learn=True).logits
        as_read = score(logits, targets)
        scores.append(as_read)
        if end - start == period:
            counts = _new_counts(before, cache)
            again = as_read
            if counts["steps"].any():
                again = _read_again(model, cache, before, ids, targets)
            drift = model.level_drifts(cache).cpu()
            before_step = as_read.losses.mean(1)
            after_step = again.losses.mean(1)
            pieces.append(Piece(end, before_step, after_step, counts, drift))
        after_piece()
    return joined_scores(scores, 1), pieces, _sizes_in_a_text(cache)


def _sizes_in_a_text(cache: HopeCache) -> Tensor:
    """Bytes of each level's differences in a text [L]."""
    num_levels = cache.levels.steps.shape[1]
    sizes = torch.zeros(num_levels, dtype=torch.long)
    for key, delta in cache.levels.deltas.items():
        sizes[key.level] += delta[0].nbytes
    return sizes


def _new_counts(before, cache: HopeCache) -> dict[str, Tensor]:
    """Steps, and steps left out by reason, since a snapshot [B, L], on the CPU."""
    counts = cache.levels.counts
    for name, count in counts.items():
        if before.levels is not None:
            count = count - before.levels.counts[name]
        counts[name] = count.cpu()
    return counts


def _read_again(model: PreTrainedModel, cache: HopeCache, before, ids: Tensor, targets: Tensor) -> Scores:
    """The scores of a piece from the state before it, with the levels after it; the cache stays as it is."""
    after = cache.snapshot()
    cache.rollback(before)
    cache.levels = after.levels
    logits = model(ids, cache=cache).logits
    cache.rollback(after)
    return score(logits, targets)


def joined(batches: list[list[Piece]]) -> list[Piece]:
    """The pieces of several batches of texts of one length, as those of all texts."""
    pieces = []
    for parts in zip(*batches, strict=True):
        ends, before, after, counts, drifts = zip(*parts, strict=True)
        joined_counts = {}
        for name in COUNTS:
            joined_counts[name] = torch.cat([count[name] for count in counts])
        piece = Piece(
            end=ends[0],
            before=torch.cat(before),
            after=torch.cat(after),
            counts=joined_counts,
            drift=torch.cat(drifts),
        )
        pieces.append(piece)
    return pieces


def level_rows(pieces: list[Piece], edges: list[int], sizes: Tensor) -> list[Row]:
    """A row for every level and bucket of positions that ends at an edge; a piece belongs to the bucket of its end.

    `sizes`: bytes of a text's differences by level [L].
    """
    rows = []
    for start, end in pairwise([0, *edges]):
        inside = []
        last = None
        for piece in pieces:
            if piece.end <= end:
                last = piece
                if piece.end > start:
                    inside.append(piece)
        for level, size in enumerate(sizes.tolist()):
            row: Row = {"positions": f"{start + 1:,}-{end:,}", "level": level}
            row |= dict.fromkeys(COUNTS, 0)
            for piece in inside:
                for name, counts in piece.counts.items():
                    row[name] += int(counts[:, level].sum())
            row["drift"] = 0.0
            if last is not None:
                row["drift"] = float(last.drift[:, level].max())
            row["loss_before"] = row["loss_after"] = None
            if row["steps"]:
                row["loss_before"], row["loss_after"] = _losses_of_steps(inside, level)
            row["state_mib"] = size / 2**20
            rows.append(row)
    return rows


def _losses_of_steps(pieces: list[Piece], level: int) -> tuple[float, float]:
    """Mean losses of the texts and pieces that ended with a step of a level: as they were read, and read again."""
    before = []
    after = []
    for piece in pieces:
        has_stepped = piece.counts["steps"][:, level] > 0
        before.append(piece.before[has_stepped])
        after.append(piece.after[has_stepped])
    mean_before = torch.cat(before).double().mean()
    mean_after = torch.cat(after).double().mean()
    return float(mean_before), float(mean_after)


def level_panels(pieces: list[Piece]) -> Panels:
    """Curves over the tokens of a text for `display.small_curves`, as means over texts; a drift is the largest."""
    losses = defaultdict(list)
    drifts = defaultdict(list)
    steps = defaultdict(list)
    totals = dict.fromkeys(COUNTS, 0)
    for piece in pieces:
        losses["as it was read"].append(_point(piece, piece.before.mean()))
        losses["read again after the step"].append(_point(piece, piece.after.mean()))
        for level, drift in enumerate(piece.drift.amax(0).tolist()):
            drifts[f"level {level}"].append(_point(piece, 100 * drift))
        for name, label in COUNTS.items():
            counts = piece.counts[name].double()
            totals[name] = totals[name] + counts.mean(0)
            for level, total in enumerate(totals[name]):
                steps[f"level {level}: {label}"].append(_point(piece, total))
    for label, points in list(steps.items()):
        _, (total, _) = points[-1]
        # a reason that never came is not drawn
        if not label.endswith("steps") and not total:
            del steps[label]
    return {
        "loss of a piece, nats per token": losses,
        "drift: norm of what was learned, % of the matrix": drifts,
        "steps so far, mean of the texts": steps,
    }


def _point(piece: Piece, value: Tensor | float) -> tuple[int, tuple[float, None]]:
    """The value at the end of a piece, without an error bar."""
    return piece.end, (float(value), None)
