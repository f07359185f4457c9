"""What levels learn from one piece of a text: the part of `level_reading.py` between two steps.

Axes: B row, T token of the piece, L level.
"""

import math
from typing import NamedTuple

import torch
from transformers.modeling_utils import PreTrainedModel

from .cache_parts import ByMatrix, LevelState
from .level_learning import LevelLearning, empty_state, step
from .loss import IGNORED


class Piece(NamedTuple):
    """Tokens that are read with the same levels."""

    # arguments of the trunk
    inputs: dict
    # each token's next token [B, T], -100 where it is not scored
    targets: torch.Tensor
    # whether a token is no padding [B, T]
    real: torch.Tensor
    # whether a document begins with it, which is read without what was learned before
    begins_document: bool
    # whether the levels learn from it
    teaches: bool


class Learner(NamedTuple):
    """A model, and how it learns."""

    model: PreTrainedModel
    learning: LevelLearning
    # trained weights of the matrices that learn [o, i], and their norms
    weights: ByMatrix
    norms: ByMatrix

    def empty_state(self, rows: int) -> LevelState:
        """The state of `rows` rows before the first token."""
        return empty_state(self.weights, len(self.learning.periods), rows)


class PieceResult(NamedTuple):
    """What was read: detached."""

    # hidden states [B, T, hidden_size]
    hidden: torch.Tensor
    # summed loss of each row [B] in nats, and its number of predictions
    loss: torch.Tensor
    scored: torch.Tensor


class _PieceDeltas(NamedTuple):
    """In place of the cache's `levels` while a piece is read."""

    deltas: ByMatrix
    # the first block that needs a graph
    graph_from: int


class _PeriodEnd(NamedTuple):
    """What happens to each row's period of each level after a piece; all [B, L]."""

    closes: torch.Tensor
    # whether it takes a step, and the factor of the rate: 0 without one
    steps: torch.Tensor
    strength: torch.Tensor
    # why it takes none
    gated: torch.Tensor
    not_finite: torch.Tensor


def read_piece(learner: Learner, cache, piece: Piece) -> PieceResult:
    """Read a piece; the cache is updated, with what the piece teaches."""
    state = cache.levels
    # tensors of this piece alone, so that its gradient does not go on through states that earlier pieces left
    deltas = {key: delta.detach().requires_grad_() for key, delta in state.deltas.items()}
    cache.levels = _PieceDeltas(deltas, graph_from=min(key.block for key in deltas))
    with torch.enable_grad():
        hidden = learner.model.base_model(**piece.inputs, cache=cache).last_hidden_state
        # The last token's prediction is scored, not learned from: its target belongs to the next piece.
        learned_loss = _row_losses(learner.model, hidden, piece.targets, slice(-1))
        summed_loss = learned_loss.sum()
    with torch.no_grad():
        last_loss = _row_losses(learner.model, hidden, piece.targets, slice(-1, None))
    is_scored = piece.targets != IGNORED
    predictions = is_scored[:, :-1].sum(1)
    gradients = {}
    if piece.teaches and bool(predictions.any()):
        found = torch.autograd.grad(summed_loss, list(deltas.values()))
        gradients = dict(zip(deltas, found, strict=True))
    cache.levels = state
    if piece.teaches:
        with torch.no_grad():
            cache.levels = _after_piece(learner, state, piece.real, gradients, learned_loss.detach(), predictions)
    cache.detach_()
    return PieceResult(hidden.detach(), learned_loss.detach() + last_loss, is_scored.sum(1))


def _row_losses(model: PreTrainedModel, hidden: torch.Tensor, targets: torch.Tensor, columns: slice) -> torch.Tensor:
    """Summed next-token loss of some columns of each row [B] of hidden states [B, T, hidden_size], from float32.

    The weight of the head gets no gradient.
    """
    losses = []
    for row_hidden, row_targets in zip(hidden[:, columns], targets[:, columns], strict=True):
        losses.append(model.summed_loss(row_hidden, row_targets, head_learns=False))
    return torch.stack(losses)


def _after_piece(
    learner: Learner,
    state: LevelState,
    real: torch.Tensor,
    gradients: ByMatrix,
    loss: torch.Tensor,
    predictions: torch.Tensor,
) -> LevelState:
    """The state after a piece: the gradient added to every open period, and a step for every one that it closes.

    Args:
        real: whether a token is no padding [B, T].
        gradients: of the summed loss [B, o, i]; none without a prediction.
        loss: summed loss of each row that was learned from [B], and `predictions` their number.
    """
    state = state._replace(
        gradients=_added(state, gradients),
        tokens=state.tokens + real.sum(1).to(state.tokens),
        losses=state.losses + loss[:, None].to(state.losses),
        scored=state.scored + predictions[:, None].to(state.scored),
    )
    end = _end_of_period(learner, state)
    deltas, sums = dict(state.deltas), dict(state.gradients)
    for key, norm in learner.norms.items():
        if bool(end.steps[:, key.level].any()):
            strength = end.strength[:, key.level].to(norm.device)
            deltas[key] = step(deltas[key], sums[key], norm, learner.learning, strength[:, None, None])
        closes = end.closes[:, key.level]
        if bool(closes.all()):
            sums.pop(key, None)
        elif key in sums and bool(closes.any()):
            is_open = ~closes.to(norm.device)
            sums[key] = torch.where(is_open[:, None, None], sums[key], 0.0)
    return state._replace(
        deltas=deltas,
        gradients=sums,
        losses=torch.where(end.closes, 0.0, state.losses),
        scored=torch.where(end.closes, 0, state.scored),
        steps=state.steps + end.steps,
        skipped=state.skipped + torch.stack([end.gated, end.not_finite], dim=-1),
    )


def _added(state: LevelState, gradients: ByMatrix) -> ByMatrix:
    """The open periods' gradients with those of another piece."""
    sums = dict(state.gradients)
    for key, gradient in gradients.items():
        gradient = gradient.to(state.deltas[key].dtype)
        sums[key] = sums[key] + gradient if key in sums else gradient
    return sums


def _end_of_period(learner: Learner, state: LevelState) -> _PeriodEnd:
    """Which periods end here, and with what step."""
    learning = learner.learning
    periods = torch.tensor(learning.periods, device=state.tokens.device)
    # a piece of padding alone closes periods whose sums are empty
    closes = state.tokens[:, None] % periods == 0
    mean = state.losses / state.scored
    is_finite = mean.isfinite()
    for key, gradient in state.gradients.items():
        # the norm is not finite if an entry is not
        norm = torch.linalg.vector_norm(gradient, dim=(1, 2))
        is_finite[:, key.level] &= norm.isfinite().to(is_finite.device)
    guess = math.log(learner.model.config.vocab_size)
    gated = mean > guess if learning.gate else torch.zeros_like(is_finite)
    has_loss = closes & (state.scored > 0)
    steps = has_loss & is_finite & ~gated
    strength = torch.ones_like(mean)
    if learning.brake:
        strength = (mean / (learning.brake * guess)).clamp(max=1.0)
    return _PeriodEnd(
        closes,
        steps,
        strength=torch.where(steps, strength, 0.0),
        gated=has_loss & is_finite & gated,
        not_finite=has_loss & ~is_finite,
    )
