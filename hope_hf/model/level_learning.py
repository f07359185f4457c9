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

Axes: B row, T token of the call, L level, o and i outputs and inputs of a matrix.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from .chunks import beside

MATRICES = ("gate_proj", "up_proj", "down_proj")
# How a file holds what levels have learned, see `LevelState.named`.
LEVEL_DTYPES = ("float32", "bfloat16", "int8")
# A file's int8 may make a difference larger than the bound, in a row of a few large entries by a sixth.
_ROUNDED = 1.5
# Why a period ends without a step.
GATED, NOT_FINITE = range(2)


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
    # whether the model has a parameter for each matrix that learns, the logarithm of a factor of `rate`
    learned_rate: bool = False

    @classmethod
    def of(cls, values: "dict | LevelLearning | None") -> "LevelLearning | None":
        """The fields of a configuration file; ValueError for wrong ones."""
        if values is None or hasattr(values, "drift"):
            return values
        known = [one.name for one in fields(cls)]
        for name in values.keys() - set(known):
            raise ValueError(f"`level_learning` has no field '{name}': choose among {', '.join(known)}")
        try:
            return cls(**values)
        except StrictDataclassError as error:
            raise ValueError(f"`level_learning` holds a wrong value: {error.__cause__}") from None

    def resolved(self, config: PreTrainedConfig) -> "LevelLearning":
        """The fields with blocks and periods of a model."""
        number = config.num_hidden_layers
        blocks = list(range(min(3 * number // 4, number - 1), number)) if self.blocks is None else self.blocks
        return replace(self, blocks=blocks, periods=self.periods or [512] * len(config.level_periods))

    def check(self, config: PreTrainedConfig) -> None:
        """ValueError for values that do not fit the model."""
        levels, number = len(config.level_periods), config.num_hidden_layers
        for name in ("rate", "drift", "brake"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"`{name}` of `level_learning` must be a finite number from 0, got {value}")
        if not self.matrices or set(self.matrices) - set(MATRICES):
            raise ValueError(
                f"`matrices` of `level_learning` is {self.matrices}: choose one or more of {', '.join(MATRICES)}"
            )
        if self.blocks is not None and (not self.blocks or not set(self.blocks) <= set(range(number))):
            raise ValueError(f"`blocks` of `level_learning` is {self.blocks}: give blocks from 0 to {number - 1}")
        if self.periods is None:
            return
        if len(self.periods) != levels or min(self.periods) < 2:
            raise ValueError(
                f"`periods` of `level_learning` is {self.periods}: give {levels} numbers from 2 on, one for each level"
            )
        for fast, slow in pairwise(self.periods):
            if slow % fast:
                raise ValueError(
                    f"`periods` of `level_learning` is {self.periods}: each must be a multiple of the one before"
                )


class MatrixKey(NamedTuple):
    """A matrix that learns."""

    block: int
    level: int
    matrix: str

    def __str__(self) -> str:
        return f"{self.block}.{self.level}.{self.matrix}"


class Taught(NamedTuple):
    """What moves a map's weights while it reads."""

    # difference to the trained weights of each row [B, o, i]
    delta: torch.Tensor
    # its derivative by the logarithm of its rate [B, o, i], where the rate is a trained parameter
    derivative: torch.Tensor | None = None
    # the tokens that are read with it [B, T, 1]; `None`: all
    tokens: torch.Tensor | None = None


class LevelState(NamedTuple):
    """What the levels of a model have learned from each row's text."""

    # differences to the trained weights [B, o, i], float32 or wider
    deltas: dict[MatrixKey, torch.Tensor]
    # gradient of the loss summed over the open period, of the same shapes; a matrix without an open period has none
    gradients: dict[MatrixKey, torch.Tensor]
    # real tokens that were read for learning [B]
    tokens: torch.Tensor
    # loss in nats and number of predictions in the open period of each level [B, L]
    losses: torch.Tensor
    scored: torch.Tensor
    # steps taken [B, L], and steps left out, by reason (`GATED`, `NOT_FINITE`) [B, L, 2]
    steps: torch.Tensor
    skipped: torch.Tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LevelState":
        """The state with `function` applied to every tensor."""
        deltas, gradients = ({key: function(x) for key, x in named.items()} for named in self[:2])
        return LevelState(deltas, gradients, *map(function, self[2:]))

    @property
    def taught(self) -> dict[MatrixKey, list[Taught]]:
        """What moves the weights of each matrix."""
        return {key: [Taught(delta)] for key, delta in self.deltas.items()}

    def forget(self, rows: torch.Tensor) -> "LevelState":
        """The state in which some rows [B] are as before their first token, but for their number of tokens."""
        forgotten = self.map(lambda x: torch.where(beside(rows.to(x.device), x), 0, x))
        return forgotten._replace(tokens=self.tokens)

    def named(self, dtype: str = "float32") -> dict[str, torch.Tensor]:
        """The tensors by name, for a file.

        Args:
            dtype: of the deltas: "float32" stores them as they are, "bfloat16" rounds them, "int8" also holds a
                factor for every row of a matrix.
        """
        tensors = {}
        for part, matrices in zip(self._fields[:2], self[:2], strict=True):
            for key, matrix in matrices.items():
                if dtype == "int8":
                    factor = matrix.abs().amax(-1, keepdim=True) / 127
                    tensors[f"factors.{part}.{key}"] = factor
                    matrix = (matrix / factor.clamp_min(torch.finfo(factor.dtype).tiny)).round().to(torch.int8)
                tensors[f"{part}.{key}"] = matrix.bfloat16() if dtype == "bfloat16" else matrix
        return tensors | {name: getattr(self, name) for name in self._fields[2:]}

    @classmethod
    def of_named(cls, tensors: dict[str, torch.Tensor]) -> "LevelState":
        """The inverse of `named`; KeyError or ValueError if a tensor is missing or has another name."""
        parts: dict[str, dict[MatrixKey, torch.Tensor]] = {"deltas": {}, "gradients": {}}
        for name in tensors.keys() - set(cls._fields) - {f"factors.{name}" for name in tensors}:
            part, block, level, matrix = name.split(".")
            factor = tensors.get(f"factors.{name}", 1)
            parts[part][MatrixKey(int(block), int(level), matrix)] = tensors[name] * factor
        return cls(*parts.values(), *(tensors[name] for name in cls._fields[2:]))

    @property
    def counts(self) -> dict[str, torch.Tensor]:
        """Steps of each row and level [B, L], and periods that ended without one, by reason."""
        skipped = {"skipped_gate": self.skipped[..., GATED], "skipped_not_finite": self.skipped[..., NOT_FINITE]}
        return {"steps": self.steps, **skipped}

    def drifts(self, norms: dict[MatrixKey, torch.Tensor]) -> torch.Tensor:
        """Largest norm of a difference of each row and level [B, L], relative to its matrix's in `weight_norms`."""
        largest = torch.zeros_like(self.losses)
        for key, delta in self.deltas.items():
            drift = torch.linalg.vector_norm(delta, dim=(1, 2)) / norms[key]
            largest[:, key.level] = largest[:, key.level].maximum(drift.to(largest))
        return largest

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.deltas.values(), *self.gradients.values(), *self[2:]))


def taught_by_block(
    config: PreTrainedConfig, taught: dict[MatrixKey, list[Taught]]
) -> dict[int, dict[int, dict[str, list[Taught]]]]:
    """What moves the weights, by block, level and matrix; ValueError if it is of another model."""
    blocks: dict[int, dict[int, dict[str, list[Taught]]]] = {}
    for (block, level, matrix), parts in taught.items():
        sizes = config.level_intermediate_sizes
        fits = block < config.num_hidden_layers and level < len(sizes)
        shape = (config.hidden_size, sizes[level]) if fits else ()
        found = parts[0].delta.shape[1:]
        if found != (shape if matrix == "down_proj" else shape[::-1]):
            raise ValueError(
                f"the cache holds what {matrix} of block {block} has learned as {list(found)}, which does not "
                "fit this model: give a cache that this model has written"
            )
        blocks.setdefault(block, {}).setdefault(level, {})[matrix] = parts
    return blocks


def empty_state(weights: dict[MatrixKey, torch.Tensor], levels: int, rows: int) -> LevelState:
    """The state of `rows` rows before the first token, for `learning_weights` of that many levels a block."""
    deltas = {}
    for key, weight in weights.items():
        dtype = torch.promote_types(weight.dtype, torch.float32)
        deltas[key] = torch.zeros(rows, *weight.shape, dtype=dtype, device=weight.device)
    device = next(iter(deltas.values())).device
    counts = torch.zeros(rows, levels, dtype=torch.long, device=device)
    losses = torch.zeros(rows, levels, dtype=next(iter(deltas.values())).dtype, device=device)
    skipped = torch.zeros(rows, levels, 2, dtype=torch.long, device=device)
    return LevelState(deltas, {}, counts[:, 0].clone(), losses, counts, counts.clone(), skipped)


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
    weights = learning_weights(model, learning.resolved(model.config))
    fresh = empty_state(weights, len(model.config.level_periods), rows)
    if state.deltas.keys() != fresh.deltas.keys() or state.gradients.keys() - fresh.deltas.keys():
        raise ValueError("holds what other levels than this model's have learned")
    deltas, gradients = ({key: tensor.to(fresh.deltas[key]) for key, tensor in named.items()} for named in state[:2])
    placed = LevelState(
        deltas, gradients, *(held.to(like.device) for held, like in zip(state[2:], fresh[2:], strict=True))
    )
    given, expected = placed.named(), fresh._replace(gradients={key: fresh.deltas[key] for key in gradients}).named()
    for name, tensor in given.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            raise ValueError(f"holds 'levels.{name}' as {list(tensor.shape)} {tensor.dtype}")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise ValueError(f"holds NaN or infinity in 'levels.{name}': read the text again and save a new one")
        if not tensor.is_floating_point() and int(tensor.min()) < 0:
            raise ValueError(f"holds negative counts in 'levels.{name}': read the text again and save a new one")
    drift = float(placed.drifts(weight_norms(weights)).max())
    if drift > _ROUNDED * learning.drift:
        raise ValueError(
            f"holds differences of {drift:.3g} times their matrices, beyond the `drift` {learning.drift} of "
            "`level_learning`: read the text again and save a new one"
        )
    return placed


def rate_factors(model: PreTrainedModel, learning: LevelLearning) -> dict[MatrixKey, torch.Tensor]:
    """The learned factor of the rate of every matrix that has one; detached scalars."""
    factors = {}
    for block in learning.blocks:
        for level, module in enumerate(model.base_model.layers[block].continuum.levels):
            if module.rates is not None:
                weight = module.rates.weight.detach()
                weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
                for name, factor in zip(module.rates.matrices, weight.exp(), strict=True):
                    factors[MatrixKey(block, level, name)] = factor
    return factors


def weight_norms(weights: dict[MatrixKey, torch.Tensor]) -> dict[MatrixKey, torch.Tensor]:
    """Norm |W| of each matrix, float32 or wider."""
    return {
        key: torch.linalg.vector_norm(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for key, weight in weights.items()
    }


def learning_weights(model: PreTrainedModel, learning: LevelLearning) -> dict[MatrixKey, torch.Tensor]:
    """The trained weights of the matrices that learn, as plain tensors.

    Raises:
        ValueError: a matrix is sharded, offloaded, or quantised in a way that hides its values.
    """
    weights = {}
    for block in learning.blocks:
        for level, module in enumerate(model.base_model.layers[block].continuum.levels):
            for name in learning.matrices:
                projection = getattr(module, name)
                # an adapter keeps the trained map as `base_layer`
                weight = getattr(projection, "base_layer", projection).weight.detach()
                if hasattr(weight, "full_tensor"):
                    weight = weight.full_tensor()
                elif type(weight).__module__.partition(".")[0] != "torch":
                    # a quantised weight
                    weight = weight.dequantize()
                # engines flatten or empty the weights that they cut
                if weight.is_meta or weight.ndim != 2 or not weight.is_floating_point():
                    how = "offloaded" if weight.is_meta else f"stored as {list(weight.shape)} {weight.dtype}"
                    raise ValueError(
                        f"{name} of block {block} is {how}, so its level cannot learn: load the model whole, in "
                        "floating point or as torchao's int8"
                    )
                weights[MatrixKey(block, level, name)] = weight
    return weights


def step(
    delta: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor, learning: LevelLearning, strength: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next delta [B, o, i] of a matrix of the given norm, and the factor [B, 1, 1] that kept it in the bound.

    Rows with a `strength` [B, 1, 1] of 0 keep theirs.
    """
    takes_step = strength > 0
    if not bool(takes_step.all()):
        # the gradient may be the reason, as a number that is not finite
        gradient = torch.where(takes_step, gradient, 0.0)
    size = learning.rate * norm / gradient[0].numel() ** 0.5 * strength
    moved = torch.addcmul(delta, normalised(gradient), size, value=-1)
    drift = torch.linalg.vector_norm(moved, dim=(1, 2), keepdim=True)
    kept = (learning.drift * norm / drift.clamp_min(torch.finfo(delta.dtype).tiny)).clamp(max=1.0)
    # a row without a step is inside the bound already
    return moved * kept if bool((kept < 1).any()) else moved, kept


@torch.no_grad()
def next_derivative(
    derivative: torch.Tensor, delta: torch.Tensor, moved: torch.Tensor, kept: torch.Tensor
) -> torch.Tensor:
    """Derivative of a delta [B, o, i] by the logarithm of its rate after a step from `delta` to `moved` (`step`).

    The gradient counts as a constant. In the bound, what changes the norm alone has no effect.
    """
    tiny = torch.finfo(moved.dtype).tiny
    free = derivative - delta + moved / kept.clamp_min(tiny)
    along = (moved * free).sum((1, 2), keepdim=True) / moved.square().sum((1, 2), keepdim=True).clamp_min(tiny)
    return torch.where(kept < 1, kept * (free - moved * along), free)


def normalised(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients [B, o, i] over the root mean squares of their rows and columns; RMS at most 1.

    As in Adafactor (arXiv 1804.04235), but of this gradient alone.
    """
    total, rows, columns = (torch.linalg.vector_norm(gradient, dim=axes, keepdim=True) for axes in ((1, 2), 2, 1))
    # a row or column of zeros stays one
    rows, columns = (norms.masked_fill(norms == 0, 1.0) for norms in (rows, columns))
    even = gradient * (total / rows) / columns
    rms = torch.linalg.vector_norm(even, dim=(1, 2), keepdim=True) / gradient[0].numel() ** 0.5
    return even / rms.clamp_min(1.0)
