"""Levels that go on learning while the model reads (equations 70 to 74).

A text is read in pieces. After each piece the levels take a step along the gradient of the network's own next-token
loss on it, and the next piece is read with the changed levels. What a sequence teaches is a difference to the trained
weights, a state of the cache: `W + D`, one `D` per sequence. The trained weights never change.

For a matrix `W` and the gradient `G` of the loss of the period just read:

    U_ij = G_ij |G| / (|G_i.| |G_.j|),  U <- U min(1, 1 / RMS(U))
    D <- D - rate RMS(W) s U
    D <- D min(1, drift |W| / |D|)

`s` is 0 if the mean loss is above that of a uniform guess, ln V, else `min(1, loss / (brake ln V))`. The gradient goes
through the piece alone, not through the states that earlier pieces left. The raw gradient fails: a few directions hold
most of it.

This file has the rule and one piece; `level_reading.py` reads a text piece by piece.

Axes: B row, T token of the piece, L level, o and i outputs and inputs of a matrix.
"""

import math
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from typing import NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from .cache_parts import ByMatrix, LevelState, MatrixKey
from .loss import IGNORED

MATRICES = ("gate_proj", "up_proj", "down_proj")
# A file's int8 may make a difference larger than the bound, in a row of a few large entries by a sixth.
_ROUNDED = 1.5


@strict
@dataclass
class LevelLearning:
    """How levels learn while reading: `HopeConfig.level_learning`.

    The defaults are those of a trained model of 135 M parameters (`docs/log`). Doubling the best rate makes the loss
    worse; a thirtieth of it still helps. Under-trained models need 10 to 40 times the default
    (`hope_hf.learning_rate_search`).

    Example:

    ```python
    >>> from hope_hf import HopeConfig, LevelLearning
    >>> config = HopeConfig(hidden_size=64, num_hidden_layers=8, level_learning=LevelLearning(rate=0.01))
    >>> config.level_learning.resolved(config).blocks
    [6, 7]

    ```
    """

    # which of gate_proj, up_proj and down_proj change
    matrices: list[str] = field(default_factory=lambda: ["down_proj"])
    # which blocks learn; `None`: the upper quarter. Blocks below the first are read without a backward pass
    blocks: list[int] | None = None
    # tokens between two steps of each level, each a multiple of the one before; `None`: 512
    periods: list[int] | None = None
    # largest root mean square of a step, relative to that of the matrix
    rate: float | int = 0.0025
    # largest norm of the difference, relative to that of the matrix
    drift: float | int = 0.01
    # no step on a text whose mean loss is above that of a uniform guess
    gate: bool = True
    # below this share of a uniform guess's loss, steps shrink with the loss: a text that repeats teaches little
    brake: float | int = 0.1

    @classmethod
    def of(cls, values: "dict | LevelLearning | None") -> "LevelLearning | None":
        """The fields of a configuration file; ValueError for wrong ones."""
        if values is None or hasattr(values, "drift"):
            return values
        values = dict(values)
        # files of before have a field for rates that were trained
        if not values.get("learned_rate"):
            values.pop("learned_rate", None)
        for name in values:
            if name not in cls.__dataclass_fields__:
                known = ", ".join(cls.__dataclass_fields__)
                raise ValueError(f"`level_learning` has no field '{name}': choose among {known}")
        try:
            return cls(**values)
        except StrictDataclassError as error:
            raise ValueError(f"`level_learning` holds a wrong value: {error.__cause__}") from None

    def resolved(self, config: PreTrainedConfig) -> "LevelLearning":
        """The fields with blocks and periods of a model."""
        number = config.num_hidden_layers
        blocks = self.blocks
        if blocks is None:
            first = min(3 * number // 4, number - 1)
            blocks = list(range(first, number))
        periods = self.periods or [512] * len(config.level_periods)
        return replace(self, blocks=blocks, periods=periods)

    def check(self, config: PreTrainedConfig) -> None:
        """ValueError for values that do not fit the model."""
        for name in ("rate", "drift", "brake"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ValueError(f"`{name}` of `level_learning` must be a finite number from 0, got {value}")
        if not self.matrices or set(self.matrices) - set(MATRICES):
            raise _wrong_field("matrices", self.matrices, f"choose one or more of {', '.join(MATRICES)}")
        if self.blocks is not None:
            known = range(config.num_hidden_layers)
            if not self.blocks or set(self.blocks) - set(known):
                raise _wrong_field("blocks", self.blocks, f"give blocks from 0 to {known[-1]}")
        if self.periods is not None:
            self._check_periods(len(config.level_periods))

    def _check_periods(self, levels: int) -> None:
        if len(self.periods) != levels or min(self.periods) < 2:
            raise _wrong_field("periods", self.periods, f"give {levels} numbers from 2 on, one for each level")
        for fast, slow in pairwise(self.periods):
            if slow % fast:
                raise _wrong_field("periods", self.periods, "each must be a multiple of the one before")


def _wrong_field(name: str, value, needed: str) -> ValueError:
    return ValueError(f"`{name}` of `level_learning` is {value}: {needed}")


class Learner(NamedTuple):
    """A model, and how it learns."""

    model: PreTrainedModel
    # with the blocks and periods of the model
    learning: LevelLearning
    # trained weights of the matrices that learn [o, i], and their norms |W|, float32 or wider
    weights: ByMatrix
    norms: ByMatrix

    @classmethod
    def of(cls, model: PreTrainedModel, learning: LevelLearning) -> "Learner":
        """The learner of a model.

        Raises:
            ValueError: a matrix is sharded, offloaded, or quantised in a way that hides its values.
        """
        learning = learning.resolved(model.config)
        weights = {}
        norms = {}
        for block in learning.blocks:
            levels = model.base_model.layers[block].continuum.levels
            for level, matrix in product(range(len(levels)), learning.matrices):
                key = MatrixKey(block, level, matrix)
                projection = getattr(levels[level], matrix)
                weight = _plain_weight(projection, key)
                weights[key] = weight
                norms[key] = torch.linalg.vector_norm(weight, dtype=_wide_dtype(weight))
        return cls(model, learning, weights, norms)

    def empty_state(self, rows: int) -> LevelState:
        """The state of `rows` rows before the first token."""
        deltas = {}
        for key, weight in self.weights.items():
            dtype = _wide_dtype(weight)
            shape = rows, *weight.shape
            deltas[key] = torch.zeros(shape, dtype=dtype, device=weight.device)
        first = next(iter(deltas.values()))
        levels = len(self.learning.periods)
        counts = torch.zeros(rows, levels, dtype=torch.long, device=first.device)
        return LevelState(
            deltas,
            gradients={},
            tokens=counts.new_zeros(rows),
            losses=first.new_zeros(rows, levels),
            scored=counts,
            steps=counts.clone(),
            skipped=counts.new_zeros(rows, levels, 2),
        )


def _plain_weight(projection: nn.Module, key: MatrixKey) -> Tensor:
    """The trained weight [o, i] of a map."""
    # an adapter keeps the trained map as `base_layer`
    weight = getattr(projection, "base_layer", projection).weight.detach()
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    elif type(weight).__module__.partition(".")[0] != "torch":
        # a quantised weight
        weight = weight.dequantize()
    # engines flatten or empty the weights that they cut
    if weight.is_meta or weight.ndim != 2 or not weight.is_floating_point():
        storage = f"stored as {list(weight.shape)} {weight.dtype}"
        if weight.is_meta:
            storage = "offloaded"
        raise ValueError(
            f"{key.matrix} of block {key.block} is {storage}, so its level cannot learn: load the model whole, in "
            "floating point or as torchao's int8"
        )
    return weight


def _wide_dtype(weight: Tensor) -> torch.dtype:
    """The dtype of a weight's difference: float32, or float64 for such a weight."""
    return torch.promote_types(weight.dtype, torch.float32)


# Differences to the weights [B, o, i] by block, level and matrix.
ByBlock = dict[int, dict[int, dict[str, Tensor]]]


def deltas_by_block(config: PreTrainedConfig, deltas: ByMatrix) -> ByBlock:
    """Differences to the weights [B, o, i] by block, level and matrix; ValueError if they are of another model."""
    blocks: ByBlock = {}
    sizes = config.level_intermediate_sizes
    for (block, level, matrix), delta in deltas.items():
        needed = None
        if block < config.num_hidden_layers and level < len(sizes):
            needed = [sizes[level], config.hidden_size]
            if matrix == "down_proj":
                needed.reverse()
        _, *shape = delta.shape
        if shape != needed:
            raise ValueError(
                f"the cache holds what {matrix} of block {block} has learned as {shape}, which does not fit this "
                "model: give a cache that this model has written"
            )
        levels = blocks.setdefault(block, {})
        matrices = levels.setdefault(level, {})
        matrices[matrix] = delta
    return blocks


def loaded_state(state: LevelState, fields: dict, model: PreTrainedModel, rows: int) -> LevelState:
    """A state of a file, on the devices of the model's levels.

    Args:
        state: what the file holds.
        fields: `level_learning` of the model that wrote it.
        model: the model that reads on.
        rows: sequences that the file's other tensors hold.

    Raises:
        ValueError: the model does not learn, learns with other fields, or has other levels; or no text teaches such
            values.
    """
    learning = model.config.level_learning
    if learning is None:
        raise ValueError(
            f"holds what levels have learned: set model.config.level_learning = LevelLearning(**{fields})"
        )
    for name, value in asdict(learning).items():
        if fields.get(name) != value:
            raise ValueError(
                f"was written with `{name}` of `level_learning` at {fields.get(name)}, and the model has {value}: set "
                "the model's to the file's"
            )
    learner = Learner.of(model, learning)
    empty = learner.empty_state(rows)
    known = empty.deltas.keys()
    if state.deltas.keys() != known or not state.gradients.keys() <= known:
        raise ValueError("holds what other levels than this model's have learned")
    expected = empty.with_gradients_of(set(state.gradients)).named_tensors()
    tensors = state.named_tensors()
    for name, tensor in tensors.items():
        like = expected[name]
        # a file may hold matrices in a lower precision
        is_matrix = name.startswith(("deltas.", "gradients."))
        tensors[name] = tensor.to(like if is_matrix else like.device)
        _check_tensor(name, tensors[name], like)
    loaded = LevelState.of_named(tensors)
    drift = float(loaded.drifts(learner.norms).max())
    if drift > _ROUNDED * learning.drift:
        raise ValueError(
            f"holds differences of {drift:.3g} times their matrices, beyond the `drift` {learning.drift} of "
            "`level_learning`: read the text again and save a new one"
        )
    return loaded


def _check_tensor(name: str, tensor: Tensor, like: Tensor) -> None:
    """ValueError if a tensor of a file has another shape or dtype, or holds what no text teaches."""
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(f"holds 'levels.{name}' as {list(tensor.shape)} {tensor.dtype}")
    wrong = None
    if not bool(tensor.isfinite().all()):
        wrong = "NaN or infinity"
    elif not tensor.is_floating_point() and int(tensor.min()) < 0:
        wrong = "negative counts"
    if wrong is not None:
        raise ValueError(f"holds {wrong} in 'levels.{name}': read the text again and save a new one")


def step(delta: Tensor, gradient: Tensor, norm: Tensor, learning: LevelLearning, strength: Tensor) -> Tensor:
    """The next delta [B, o, i] of a matrix of the given norm; rows with a `strength` [B, 1, 1] of 0 keep theirs."""
    takes_step = strength > 0
    if not bool(takes_step.all()):
        # the gradient may be the reason, as a number that is not finite
        gradient = torch.where(takes_step, gradient, 0.0)
    root_of_entries = gradient[0].numel() ** 0.5
    size = learning.rate * norm / root_of_entries * strength
    even = normalised(gradient)
    # in the memory of U: a fresh one costs more time than the sum
    moved = torch.addcmul(delta, even, size, value=-1, out=even)
    tiny = torch.finfo(delta.dtype).tiny
    drift = _norms(moved, dim=(1, 2)).clamp_min(tiny)
    factor = (learning.drift * norm / drift).clamp(max=1.0)
    # a row without a step is inside the bound already
    exceeds = bool((factor < 1).any())
    return moved.mul_(factor) if exceeds else moved


def normalised(gradient: Tensor) -> Tensor:
    """U: gradients [B, o, i] times their norm |G|, over the norms of the entry's row and column; RMS at most 1.

    As in Adafactor (arXiv 1804.04235), but of this gradient alone.
    """
    squares = gradient.square()
    rows = squares.sum(2, keepdim=True).sqrt_()
    columns = squares.sum(1, keepdim=True).sqrt_()
    total = _norms(rows, dim=1)
    # a row or column of zeros stays one
    rows = rows.masked_fill(rows == 0, 1.0)
    columns = columns.masked_fill(columns == 0, 1.0)
    even = torch.mul(gradient, total / rows, out=squares).div_(columns)
    root_of_entries = gradient[0].numel() ** 0.5
    rms = _norms(even, dim=(1, 2)) / root_of_entries
    return even.div_(rms.clamp_min(1.0))


def _norms(matrices: Tensor, dim: int | tuple[int, int]) -> Tensor:
    """Norms of matrices [B, o, i] over axes, which stay with size 1."""
    return torch.linalg.vector_norm(matrices, dim=dim, keepdim=True)


class Piece(NamedTuple):
    """Tokens that are read with the same levels."""

    # arguments of the trunk
    inputs: dict
    # each token's next token [B, T], -100 where it is not scored
    targets: Tensor
    # whether a token is no padding [B, T]
    real: Tensor
    # whether a document begins with it, which is read without what was learned before
    begins_document: bool
    # whether the levels learn from it
    teaches: bool


class PieceResult(NamedTuple):
    """What was read: detached."""

    # hidden states [B, T, hidden_size]
    hidden: Tensor
    # summed loss of each row [B] in nats, and its number of predictions
    loss: Tensor
    scored: Tensor


class _PieceDeltas(NamedTuple):
    """In place of the cache's `levels` while a piece is read."""

    deltas: ByMatrix
    # the first block that needs a graph
    graph_from: int


class _PeriodEnd(NamedTuple):
    """What happens to each row's period of each level after a piece; all [B, L]."""

    closes: Tensor
    # whether it takes a step, and the factor of the rate: 0 without one
    steps: Tensor
    strength: Tensor
    # why it takes none
    gated: Tensor
    not_finite: Tensor


def read_piece(learner: Learner, cache, piece: Piece) -> PieceResult:
    """Read a piece; the cache is updated, with what the piece teaches."""
    state = cache.levels
    # tensors of this piece alone, so that its gradient does not go on through states that earlier pieces left
    deltas = {}
    for key, delta in state.deltas.items():
        deltas[key] = delta.detach().requires_grad_()
    first_block = min(key.block for key in deltas)
    cache.levels = _PieceDeltas(deltas, graph_from=first_block)
    with torch.enable_grad():
        outputs = learner.model.base_model(**piece.inputs, cache=cache)
        hidden = outputs.last_hidden_state
        # The last token's prediction is scored, not learned from: its target belongs to the next piece.
        learned_loss = _row_losses(learner.model, hidden, piece.targets, slice(-1))
        summed_loss = learned_loss.sum()
    cache.levels = state
    is_scored = piece.targets != IGNORED
    with torch.no_grad():
        last_loss = _row_losses(learner.model, hidden, piece.targets, slice(-1, None))
    learned_loss = learned_loss.detach()
    if piece.teaches:
        predictions = is_scored[:, :-1].sum(1)
        gradients = {}
        if bool(predictions.any()):
            tensors = torch.autograd.grad(summed_loss, list(deltas.values()))
            gradients = dict(zip(deltas, tensors, strict=True))
        with torch.no_grad():
            read = _with_piece(state, piece.real, gradients, learned_loss, predictions)
            cache.levels = _with_steps(learner, read)
    cache.detach_()
    loss = learned_loss + last_loss
    return PieceResult(hidden.detach(), loss, scored=is_scored.sum(1))


def _row_losses(model: PreTrainedModel, hidden: Tensor, targets: Tensor, columns: slice) -> Tensor:
    """Summed next-token loss of some columns of each row [B] of hidden states [B, T, hidden_size], from float32.

    The weight of the head gets no gradient.
    """
    hidden = hidden[:, columns]
    targets = targets[:, columns]
    losses = []
    for row in range(len(hidden)):
        loss = model.summed_loss(hidden[row], targets[row], head_learns=False)
        losses.append(loss)
    return torch.stack(losses)


def _with_piece(state: LevelState, real: Tensor, gradients: ByMatrix, loss: Tensor, predictions: Tensor) -> LevelState:
    """The state with a piece added to every open period.

    Args:
        real: whether a token is no padding [B, T].
        gradients: of the summed loss [B, o, i]; none without a prediction.
        loss: summed loss of each row that was learned from [B], and `predictions` their number.
    """
    sums = dict(state.gradients)
    for key, gradient in gradients.items():
        # a product of several rows makes it transposed, which costs more time in the step than a copy
        gradient = gradient.to(state.deltas[key].dtype).contiguous()
        if key in sums:
            gradient = sums[key] + gradient
        sums[key] = gradient
    return state._replace(
        gradients=sums,
        tokens=state.tokens + real.sum(1).to(state.tokens),
        losses=state.losses + loss[:, None].to(state.losses),
        scored=state.scored + predictions[:, None].to(state.scored),
    )


def _with_steps(learner: Learner, state: LevelState) -> LevelState:
    """The state after a step for every period that closes."""
    end = _end_of_period(learner, state)
    deltas = dict(state.deltas)
    gradients = dict(state.gradients)
    for key, norm in learner.norms.items():
        level = key.level
        if bool(end.steps[:, level].any()):
            # [B, 1, 1]
            strength = end.strength[:, level, None, None].to(norm.device)
            delta = deltas[key]
            deltas[key] = step(delta, gradients[key], norm, learner.learning, strength)
        closes = end.closes[:, level]
        if bool(closes.all()):
            gradients.pop(key, None)
        elif key in gradients and bool(closes.any()):
            is_open = ~closes[:, None, None].to(norm.device)
            gradients[key] = torch.where(is_open, gradients[key], 0.0)
    skipped = torch.stack([end.gated, end.not_finite], dim=-1)
    return state._replace(
        deltas=deltas,
        gradients=gradients,
        losses=torch.where(end.closes, 0.0, state.losses),
        scored=torch.where(end.closes, 0, state.scored),
        steps=state.steps + end.steps,
        skipped=state.skipped + skipped,
    )


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
        is_finite_norm = norm.isfinite().to(is_finite.device)
        is_finite[:, key.level] &= is_finite_norm
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
