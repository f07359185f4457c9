"""What levels learn from one piece of a text: the part of `level_reading.py` between two steps.

Axes: B row, T token of the piece, L level.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from .level_learning import LevelLearning, LevelState, MatrixKey, Taught, next_derivative, step
from .loss import IGNORED


@contextmanager
def _stays_gathered(model: nn.Module) -> Iterator[None]:
    """A backward pass within the model's forward: FSDP would end the step and free the weights of the root."""
    is_sharded = hasattr(model, "set_reshard_after_backward")
    if is_sharded:
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
    yield
    if is_sharded:
        model.set_is_last_backward(True)
        model.set_reshard_after_backward(True)


class Piece(NamedTuple):
    """Tokens that are read with the same levels."""

    # arguments of the trunk
    inputs: dict
    # each token's next token [B, T], -100 where it is not scored
    targets: torch.Tensor
    # whether a token is no padding [B, T]
    real: torch.Tensor
    # whether a document begins with a token after another one of the row [B, T]
    begins: torch.Tensor | None
    # whether the levels learn from it
    teaches: bool


class Learner(NamedTuple):
    """A model, and how it learns."""

    model: PreTrainedModel
    learning: LevelLearning
    norms: dict[MatrixKey, torch.Tensor]
    # learned factors of the rate
    factors: dict[MatrixKey, torch.Tensor]
    # derivatives of deltas by the logarithm of that factor, once they differ from the deltas, which is where the bound
    # is reached; written by `_after_piece`
    derivatives: dict[MatrixKey, torch.Tensor]


class _Moved(NamedTuple):
    """In place of the cache's `levels` while a piece is read."""

    taught: dict[MatrixKey, list[Taught]]
    # the first block that needs a graph
    graph_from: int


def read_piece(learner: Learner, cache, piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of a piece, and each row's summed loss and number of predictions; the cache is updated."""
    if torch.is_grad_enabled():
        return _read_with_graph(learner, cache, piece, keeps_graph=True)
    with torch.enable_grad():
        hidden, losses, scored = _read_with_graph(learner, cache, piece, keeps_graph=False)
    cache.detach_()
    return hidden.detach(), losses.detach(), scored


def _read_with_graph(learner: Learner, cache, piece: Piece, keeps_graph: bool):
    """The result of `read_piece`. `keeps_graph`: whether a backward pass follows, for which losses are not needed."""
    model, targets = learner.model, piece.targets
    state, earlier, starts = _at_documents(learner, cache.levels, piece, keeps_graph)
    # tensors of this piece alone, so that its gradient does not go on through states that earlier pieces left
    deltas = {key: delta.detach().requires_grad_() for key, delta in state.deltas.items()}
    own = None if earlier is None else _from(starts, piece.real)[..., None]
    taught = {
        key: [Taught(delta, _derivative(learner, key, delta, keeps_graph), own), *(earlier or {}).get(key, ())]
        for key, delta in deltas.items()
    }
    cache.levels = _Moved(taught, graph_from=0 if keeps_graph else min(key.block for key in deltas))
    hidden = model.base_model(**piece.inputs, cache=cache).last_hidden_state
    # The last token's prediction is scored, not learned from: its target belongs to the next piece.
    inside = _row_losses(model, hidden, targets, [slice(start, -1) for start in starts])
    losses = inside.detach()
    if not keeps_graph:
        others = [[*range(start), targets.shape[1] - 1] for start in starts]
        with torch.no_grad():
            losses = losses + _row_losses(model, hidden, targets, others)
    inner = _from(starts, targets != IGNORED)
    inner[:, -1] = False
    learned, scored = inner.sum(1), (targets != IGNORED).sum(1)
    gradients = {}
    # Sharded levels communicate: in training, every process goes back through every piece.
    if piece.teaches and targets.shape[1] > 1 and (keeps_graph or bool(learned.any())):
        with _stays_gathered(model):
            found = torch.autograd.grad(inside.sum(), [*deltas.values()], retain_graph=keeps_graph)
        gradients = dict(zip(deltas, found, strict=True))
    cache.levels = state
    if piece.teaches:
        with torch.no_grad():
            cache.levels = _after_piece(learner, state, gradients, inside.detach(), learned, piece.real)
    return hidden, losses, scored


def _at_documents(learner: Learner, state: LevelState, piece: Piece, keeps_graph: bool):
    """The state with which the row's last document of a piece is read, and what the document before it is read with.

    Returns the state, by matrix what moves the weights for the tokens of the document that goes on into the piece
    (`None` if no document begins), and the column of each row's first token of its last document.
    """
    if piece.begins is None or not bool(piece.begins.any()):
        return state, None, [0] * len(piece.real)
    number = piece.begins.cumsum(1)
    rows = number[:, -1] > 0
    goes_on = ((number == 0) & rows[:, None])[..., None]
    earlier = {
        key: [Taught(delta, _derivative(learner, key, delta, keeps_graph), goes_on)]
        for key, delta in state.deltas.items()
    }
    for key, derivative in learner.derivatives.items():
        learner.derivatives[key] = torch.where(rows.to(derivative.device)[:, None, None], 0.0, derivative)
    starts = (number == number[:, -1:]).long().argmax(1).tolist()
    return state.forget(rows), earlier, starts


def _derivative(learner: Learner, key: MatrixKey, delta: torch.Tensor, keeps_graph: bool) -> torch.Tensor | None:
    if not keeps_graph or key not in learner.factors:
        return None
    return learner.derivatives.get(key, delta.detach())


def _from(starts: list[int], chosen: torch.Tensor) -> torch.Tensor:
    """The tokens of `chosen` [B, T] from a column of each row on."""
    columns = torch.arange(chosen.shape[1], device=chosen.device)
    return chosen & (columns >= torch.tensor(starts, device=chosen.device)[:, None])


def _row_losses(model, hidden: torch.Tensor, targets: torch.Tensor, columns: list) -> torch.Tensor:
    """Summed next-token loss of the chosen columns of each row [B] of hidden states [B, T, hidden_size], from float32.

    The weight of the head gets no gradient. `columns`: a slice or a list of columns for each row.
    """
    rows = zip(hidden, targets, columns, strict=True)
    losses = [model.summed_loss(own[chosen], labels[chosen], head_learns=False) for own, labels, chosen in rows]
    return torch.stack(losses)


def _after_piece(learner: Learner, state: LevelState, gradients, loss, learned, real) -> LevelState:
    """The state after a piece: the gradient added to every open period, and a step for every one that it closes."""
    learning, device = learner.learning, state.tokens.device
    tokens = state.tokens + real.sum(1).to(device)
    losses = state.losses + loss[:, None].to(state.losses)
    scored = state.scored + learned[:, None].to(device)
    periods = torch.tensor(learning.periods, device=device)
    # a piece of padding alone closes periods whose sums are empty
    closes = tokens[:, None] % periods == 0
    sums = dict(state.gradients)
    for key, gradient in gradients.items():
        gradient = gradient.to(state.deltas[key].dtype)
        sums[key] = sums[key] + gradient if key in sums else gradient
    mean = losses / scored
    guess = math.log(learner.model.config.vocab_size)
    finite = mean.isfinite()
    for key, gradient in sums.items():
        # the norm is not finite if an entry is not
        finite[:, key.level] &= torch.linalg.vector_norm(gradient.detach(), dim=(1, 2)).isfinite().to(device)
    gated = mean > guess if learning.gate else torch.zeros_like(finite)
    has_loss = closes & (scored > 0)
    steps = has_loss & finite & ~gated
    strength = (mean / (learning.brake * guess)).clamp(max=1.0) if learning.brake else torch.ones_like(mean)
    strength = torch.where(steps, strength, 0.0)
    deltas = dict(state.deltas)
    for key, norm in learner.norms.items():
        level = key.level
        if bool(steps[:, level].any()):
            size = strength[:, level].to(norm.device)[:, None, None] * learner.factors.get(key, 1.0)
            before = deltas[key]
            deltas[key], kept = step(before, sums[key], norm, learning, size)
            if key in learner.derivatives or key in learner.factors and bool((kept < 1).any()):
                derivative = learner.derivatives.get(key, before)
                learner.derivatives[key] = next_derivative(derivative, before, deltas[key], kept)
        if bool(closes[:, level].all()):
            sums.pop(key, None)
        elif key in sums and bool(closes[:, level].any()):
            is_open = ~closes[:, level].to(norm.device)
            sums[key] = torch.where(is_open[:, None, None], sums[key], 0.0)
    reasons = torch.stack([has_loss & finite & gated, has_loss & ~finite], dim=-1)
    return LevelState(
        deltas,
        sums,
        tokens,
        torch.where(closes, 0.0, losses),
        torch.where(closes, 0, scored),
        state.steps + steps,
        state.skipped + reasons,
    )
