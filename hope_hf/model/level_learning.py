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
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel

from .cache_parts import ByMatrix, LevelState, MatrixKey

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
        known = [one.name for one in fields(cls)]
        for name in values:
            if name not in known:
                raise ValueError(f"`level_learning` has no field '{name}': choose among {', '.join(known)}")
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


def deltas_by_block(config: PreTrainedConfig, deltas: ByMatrix) -> dict[int, dict[int, dict[str, torch.Tensor]]]:
    """Differences to the weights [B, o, i] by block, level and matrix; ValueError if they are of another model."""
    blocks: dict[int, dict[int, dict[str, torch.Tensor]]] = {}
    sizes = config.level_intermediate_sizes
    for (block, level, matrix), delta in deltas.items():
        shape = None
        if block < config.num_hidden_layers and level < len(sizes):
            outputs, inputs = sizes[level], config.hidden_size
            shape = (inputs, outputs) if matrix == "down_proj" else (outputs, inputs)
        if delta.shape[1:] != shape:
            raise ValueError(
                f"the cache holds what {matrix} of block {block} has learned as {list(delta.shape[1:])}, which does "
                "not fit this model: give a cache that this model has written"
            )
        blocks.setdefault(block, {}).setdefault(level, {})[matrix] = delta
    return blocks


def empty_state(weights: ByMatrix, levels: int, rows: int) -> LevelState:
    """The state of `rows` rows before the first token, for `learning_weights` of that many levels a block."""
    deltas = {}
    for key, weight in weights.items():
        dtype = _wide(weight)
        deltas[key] = torch.zeros(rows, *weight.shape, dtype=dtype, device=weight.device)
    first = next(iter(deltas.values()))
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
    expected = fresh._replace(gradients={key: fresh.deltas[key] for key in state.gradients}).named_tensors()
    tensors = state.named_tensors()
    for name, tensor in tensors.items():
        like = expected[name]
        # a file may hold matrices in a lower precision
        tensors[name] = tensor.to(like if name.startswith(("deltas.", "gradients.")) else like.device)
        _check_tensor(name, tensors[name], like)
    placed = LevelState.of_named(tensors)
    drift = float(placed.drifts(weight_norms(weights)).max())
    if drift > _ROUNDED * learning.drift:
        raise ValueError(
            f"holds differences of {drift:.3g} times their matrices, beyond the `drift` {learning.drift} of "
            "`level_learning`: read the text again and save a new one"
        )
    return placed


def _check_tensor(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
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


def _wide(weight: torch.Tensor) -> torch.dtype:
    """The dtype in which a weight's difference is held: float32, or float64 for such a weight."""
    return torch.promote_types(weight.dtype, torch.float32)


def weight_norms(weights: ByMatrix) -> ByMatrix:
    """Norm |W| of each matrix, float32 or wider."""
    return {key: torch.linalg.vector_norm(weight, dtype=_wide(weight)) for key, weight in weights.items()}


def learning_weights(model: PreTrainedModel, learning: LevelLearning) -> ByMatrix:
    """The trained weights of the matrices that learn, as plain tensors.

    Raises:
        ValueError: a matrix is sharded, offloaded, or quantised in a way that hides its values.
    """
    weights = {}
    for block in learning.blocks:
        for level, module in enumerate(model.base_model.layers[block].continuum.levels):
            for name in learning.matrices:
                weights[MatrixKey(block, level, name)] = _plain_weight(getattr(module, name), name, block)
    return weights


def _plain_weight(projection: nn.Module, name: str, block: int) -> torch.Tensor:
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
        how = "offloaded" if weight.is_meta else f"stored as {list(weight.shape)} {weight.dtype}"
        raise ValueError(
            f"{name} of block {block} is {how}, so its level cannot learn: load the model whole, in floating point or "
            "as torchao's int8"
        )
    return weight


def step(
    delta: torch.Tensor, gradient: torch.Tensor, norm: torch.Tensor, learning: LevelLearning, strength: torch.Tensor
) -> torch.Tensor:
    """The next delta [B, o, i] of a matrix of the given norm; rows with a `strength` [B, 1, 1] of 0 keep theirs."""
    takes_step = strength > 0
    if not bool(takes_step.all()):
        # the gradient may be the reason, as a number that is not finite
        gradient = torch.where(takes_step, gradient, 0.0)
    size = learning.rate * norm / gradient[0].numel() ** 0.5 * strength
    moved = torch.addcmul(delta, normalised(gradient), size, value=-1)
    drift = torch.linalg.vector_norm(moved, dim=(1, 2), keepdim=True)
    tiny = torch.finfo(delta.dtype).tiny
    factor = (learning.drift * norm / drift.clamp_min(tiny)).clamp(max=1.0)
    # a row without a step is inside the bound already
    return moved * factor if bool((factor < 1).any()) else moved


def normalised(gradient: torch.Tensor) -> torch.Tensor:
    """Gradients [B, o, i] over the root mean squares of their rows and columns; RMS at most 1.

    As in Adafactor (arXiv 1804.04235), but of this gradient alone.
    """
    total = torch.linalg.vector_norm(gradient, dim=(1, 2), keepdim=True)
    rows = torch.linalg.vector_norm(gradient, dim=2, keepdim=True)
    columns = torch.linalg.vector_norm(gradient, dim=1, keepdim=True)
    # a row or column of zeros stays one
    rows = rows.masked_fill(rows == 0, 1.0)
    columns = columns.masked_fill(columns == 0, 1.0)
    even = gradient * (total / rows) / columns
    rms = torch.linalg.vector_norm(even, dim=(1, 2), keepdim=True) / gradient[0].numel() ** 0.5
    return even / rms.clamp_min(1.0)
