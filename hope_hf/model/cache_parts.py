"""The parts of a cache: states of mixers, keys and values of softmax attention, and what levels have learned.

`HopeCache.parts` has them by name. Whatever a cache does, such as a fork, beams, a batch of several texts or a file,
it asks of every `CachePart` in turn: a new part is a class in this file and an entry in `HopeCache.__init__`.

Axes: B row, T token of the text, H head, L level, o and i outputs and inputs of a matrix.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from .chunks import Past

TensorFunction = Callable[[Tensor], Tensor]
NamedTensors = dict[str, Tensor]
# How a file holds what levels have learned, see `LevelState.named_tensors`.
LEVEL_DTYPES = ("float32", "bfloat16", "int8")
# Tensors of sparse attention, whose third axis grows by whole blocks.
GROWING = ("slot_keys", "slot_values", "compressed_keys", "compressed_values")
# Why a period ends without a step.
GATED, NOT_FINITE = range(2)


class KeyValues(NamedTuple):
    """Keys and values of a text [B, H, T, D], as the state of a layer."""

    keys: Tensor
    values: Tensor


def map_state(function: TensorFunction, state: tuple) -> tuple:
    """The state with `function` applied to every tensor."""
    mapped = []
    for part in state:
        if isinstance(part, tuple):
            mapped.append(tuple(function(tensor) for tensor in part))
        else:
            mapped.append(function(part))
    return type(state)(*mapped)


def named_tensors(state: tuple) -> NamedTensors:
    """The tensors of a mixer's state by name, for a file: `field`, or `field.0`, `field.1` for a tuple."""
    tensors = {}
    for field, part in state._asdict().items():
        if isinstance(part, tuple):
            for index, tensor in enumerate(part):
                tensors[f"{field}.{index}"] = tensor
        else:
            tensors[field] = part
    return tensors


def state_of_named(state_class: type[tuple], tensors: NamedTensors) -> tuple:
    """The inverse of `named_tensors`; a field without tensors is an empty tuple."""
    fields = dict.fromkeys(state_class._fields, ())
    for name, tensor in sorted(tensors.items()):
        field, _, index = name.partition(".")
        if index:
            fields[field] = (*fields[field], tensor)
        else:
            fields[field] = tensor
    return state_class(**fields)


class Rows:
    """Choice of rows, by a `map` that changes every batch-first tensor."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows `beam_idx`, in that order."""
        self.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices`."""
        self.map(lambda tensor: tensor[indices.to(tensor.device)])


class CachePart(Rows):
    """A part of a cache. `copy.copy(part)` is a snapshot of it, since new tokens make new tensors.

    Its class has these methods besides:

    - `map(function)`: apply `function` to every batch-first tensor;
    - `reset()`: return to the state before the first token;
    - `crop(tokens_to_remove)`: as in transformers; RuntimeError if the part cannot unread tokens;
    - `named_tensors(level_dtype)`: its contents for a file, empty before the first token; `level_dtype` is for what
      levels have learned;
    - `load(tensors)`: restore the result of `named_tensors`;
    - `add_padding(columns)`: act as if each row had read that many columns of padding in front of its text;
    - `keep_columns(real)`: act as if a single row had read these columns alone, the others being padding.

    `HopeCache.from_pretrained` checks what a file holds of a part against the model.
    """

    def append_rows(self, others: Sequence["CachePart"], rows: Sequence[int]) -> None:
        """Append the rows of the same part of other caches, which have read as many columns.

        Args:
            others: parts of this kind, which may be changed.
            rows: number of rows of this part's cache and of each other one.

        Raises:
            ValueError: another part is of another model.
        """
        rows_by_name = defaultdict(list)
        for part in (self, *others):
            for name, tensor in part.named_tensors().items():
                rows_by_name[name].append(tensor)
        joined = {}
        for name, tensors in rows_by_name.items():
            if len(tensors) != 1 + len(others):
                raise ValueError("the caches hold other tensors than each other: join those of one model")
            if name == "columns":
                # as many in all, and the rows are uniform if those of all parts are
                joined[name] = torch.stack(tensors).amin(0)
            elif name in GROWING:
                joined[name] = _with_empty_blocks(tensors)
            else:
                joined[name] = _concatenated(tensors)
        self.load(joined)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    """The rows of all; ValueError if they have other shapes."""
    first = parts[0]
    for part in parts:
        if part.shape[1:] != first.shape[1:]:
            raise ValueError("the caches hold tensors of other shapes than each other: join those of one model")
    return torch.cat(parts)


def _with_empty_blocks(parts: Sequence[Tensor]) -> Tensor:
    """The rows of tensors [B, H, blocks, ...]; blocks that some of them alone have are empty in the others."""
    longest = max(part.shape[2] for part in parts)
    padded = []
    for part in parts:
        missing = longest - part.shape[2]
        unchanged = (0, 0) * (part.ndim - 3)
        padded.append(F.pad(part, (*unchanged, 0, missing)))
    return _concatenated(padded)


class HopeMemoryLayer(CachePart, CacheLayerMixin):
    """State of one mixer.

    `state`, a `state_class`, is the mixer's last result; `past` counts the tokens read. Both are `None` before the
    first token.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False
    is_sliding = False

    def __init__(self, state_class: type[tuple], **kwargs):
        super().__init__()
        self.state_class = state_class
        self.reset()

    def reset(self) -> None:
        """Return to the state before the first token."""
        self.state: tuple | None = None
        self.past: Past | None = None
        self.is_initialized = False

    def update_state(self, state: tuple, past: Past) -> None:
        """Replace the state; `past` counts the tokens read."""
        self.state = state
        self.past = past
        self.device = past.seen.device
        self.is_initialized = True

    def update(self, *args, **kwargs):
        raise RuntimeError("a self-modifying memory keeps no keys and values")

    lazy_initialization = update

    def get_seq_length(self) -> int:
        """Number of columns read, including padding: `generate` slices its inputs by it."""
        return 0 if self.past is None else self.past.columns

    def get_max_length(self) -> int:
        """-1: the state does not grow."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the attention mask for the next `query_length` tokens."""
        return self.get_seq_length() + query_length, 0

    def crop(self, *args) -> None:
        raise RuntimeError("a layer's state cannot unread tokens: take a HopeCache.snapshot() and roll back")

    def map(self, function: TensorFunction) -> None:
        """Apply `function` to every tensor."""
        if self.state is not None:
            self.state = map_state(function, self.state)
            self.past = self.past.map(function)

    def offload(self) -> None:
        """Move the state to the CPU."""
        self.map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the state back to its device."""
        self.map(lambda tensor: tensor.to(self.device, non_blocking=True))

    def named_tensors(self, level_dtype: str = "float32") -> NamedTensors:
        """The layer's contents by name: batch-first tensors, and its counts `columns` as two integers."""
        if self.past is None:
            return {"columns": torch.tensor([0, 1])}
        tensors = named_tensors(self.state)
        past = self.past
        tensors["columns"] = torch.tensor([past.columns, int(past.is_uniform)])
        tensors["seen"] = self.past.seen
        return tensors

    def load(self, tensors: NamedTensors) -> None:
        """Restore the result of `named_tensors`."""
        columns, is_uniform = tensors.pop("columns").tolist()
        if tensors:
            seen = tensors.pop("seen")
            state = state_of_named(self.state_class, tensors)
            self.update_state(state, Past(columns, bool(is_uniform), seen))

    def add_padding(self, columns: int) -> None:
        """Count columns of padding in front of the text; no state depends on them."""
        if columns:
            past = self.past
            self.past = past._replace(columns=past.columns + columns, is_uniform=False)

    def keep_columns(self, real: Tensor) -> None:
        """Count the columns `real` [columns] of a single row alone."""
        columns = int(real.sum())
        is_uniform = int(self.past.seen) == columns
        self.past = self.past._replace(columns=columns, is_uniform=is_uniform)


class HopeStaticMemoryLayer(HopeMemoryLayer):
    """State of one layer in transformers' `StaticCache`, for compiled generation.

    The next token overwrites the state and the counts in place, so no gradient goes through them.
    """

    is_compileable = True

    def update_state(self, state: tuple, past: Past) -> None:
        """Copy the state and the counts into the layer's tensors."""
        if self.state is None:
            # A Python number would become a constant of the compiled graph, and every token would compile another.
            columns = torch.tensor(past.columns, device=past.seen.device)
            super().update_state(state, Past(columns, False, past.seen))
            # Cloned, since the current weights and those of the chunk's start can be one tensor.
            self.map(lambda tensor: tensor.detach().clone())
            return
        self.past.columns.copy_(past.columns)
        self.past.seen.copy_(past.seen)
        new = named_tensors(state)
        for name, tensor in named_tensors(self.state).items():
            tensor.copy_(new[name].detach())


def is_memory_layer(layer: CacheLayerMixin) -> bool:
    """Whether a cache layer is a `HopeMemoryLayer`, of this code or of another copy of it."""
    return hasattr(layer, "state_class")


class KeyValuePart(CachePart):
    """A layer of keys and values of transformers as a part of a cache, with a state as a `HopeMemoryLayer` has it."""

    def __init__(self, layer: DynamicLayer):
        self.layer = layer

    @property
    def state(self) -> KeyValues | None:
        """Keys and values of the layer; `None` before the first token."""
        if not self.layer.is_initialized:
            return None
        return KeyValues(self.layer.keys, self.layer.values)

    def update_state(self, state: KeyValues, past: Past | None = None) -> None:
        """Replace keys and values."""
        if not self.layer.is_initialized:
            self.layer.update(*state)
        self.layer.keys, self.layer.values = state

    def reset(self) -> None:
        """Return to the state before the first token."""
        # releases such as 5.17 set keys and values to zero, and keep them
        self.layer.keys = self.layer.values = None
        self.layer.is_initialized = False
        self.layer.reset()

    def crop(self, *args) -> None:
        """As in transformers."""
        self.layer.crop(*args)

    def map(self, function: TensorFunction) -> None:
        """Apply `function` to keys and values."""
        if self.layer.is_initialized:
            self.update_state(map_state(function, self.state))

    def named_tensors(self, level_dtype: str = "float32") -> NamedTensors:
        """`keys` and `values`."""
        return self.state._asdict() if self.layer.is_initialized else {}

    def load(self, tensors: NamedTensors) -> None:
        """Restore the result of `named_tensors`."""
        if tensors:
            self.update_state(KeyValues(**tensors))

    def add_padding(self, columns: int) -> None:
        """Put columns of zeros in front of keys and values."""
        self.map(lambda tensor: F.pad(tensor, (0, 0, columns, 0)))

    def keep_columns(self, real: Tensor) -> None:
        """Keep the columns `real` [columns]."""
        self.map(lambda tensor: tensor[:, :, real.to(tensor.device)])


class MatrixKey(NamedTuple):
    """A matrix that learns."""

    block: int
    level: int
    matrix: str

    def __str__(self) -> str:
        return f"{self.block}.{self.level}.{self.matrix}"

    @classmethod
    def of(cls, name: str) -> "MatrixKey":
        """The inverse of `str`."""
        block, level, matrix = name.split(".")
        return cls(int(block), int(level), matrix)


# A tensor for each matrix that learns.
ByMatrix = dict[MatrixKey, Tensor]


class LevelState(NamedTuple):
    """What the levels of a model have learned from each row's text."""

    # differences to the trained weights [B, o, i], float32 or wider
    deltas: ByMatrix
    # gradient of the loss summed over the open period, of the same shapes; a matrix without an open period has none
    gradients: ByMatrix
    # real tokens of the row's document that were read for learning [B]
    tokens: Tensor
    # loss in nats and number of predictions in the open period of each level [B, L]
    losses: Tensor
    scored: Tensor
    # steps taken [B, L], and steps left out, by reason (`GATED`, `NOT_FINITE`) [B, L, 2]
    steps: Tensor
    skipped: Tensor

    def map(self, function: TensorFunction) -> "LevelState":
        """The state with `function` applied to every tensor."""
        deltas, gradients, *counts = self
        deltas = {key: function(delta) for key, delta in deltas.items()}
        gradients = {key: function(gradient) for key, gradient in gradients.items()}
        return LevelState(deltas, gradients, *map(function, counts))

    def named_tensors(self, dtype: str = "float32") -> NamedTensors:
        """The tensors by name, for a file.

        Args:
            dtype: of the deltas and gradients: "float32" stores them as they are, "bfloat16" rounds them, "int8" also
                stores a factor for every row of a matrix.
        """
        tensors = self._asdict()
        for field in ("deltas", "gradients"):
            for key, matrix in tensors.pop(field).items():
                name = f"{field}.{key}"
                if dtype == "int8":
                    factor = matrix.abs().amax(-1, keepdim=True) / 127
                    nonzero = factor.clamp_min(torch.finfo(factor.dtype).tiny)
                    tensors[f"factors.{name}"] = factor
                    matrix = (matrix / nonzero).round().to(torch.int8)
                elif dtype == "bfloat16":
                    matrix = matrix.bfloat16()
                tensors[name] = matrix
        return tensors

    @classmethod
    def of_named(cls, tensors: NamedTensors) -> "LevelState":
        """The inverse of `named_tensors`; KeyError or ValueError if a tensor is missing or has another name."""
        matrices: dict[str, ByMatrix] = {"deltas": {}, "gradients": {}}
        for name, tensor in tensors.items():
            if name in cls._fields or name.startswith("factors."):
                continue
            field, _, key = name.partition(".")
            factor = tensors.get(f"factors.{name}")
            if factor is not None:
                tensor = tensor * factor
            matrices[field][MatrixKey.of(key)] = tensor
        counts = map(tensors.__getitem__, cls._fields[2:])
        return cls(matrices["deltas"], matrices["gradients"], *counts)

    def zeros(self, rows: int) -> "LevelState":
        """The state of `rows` rows that have learned nothing."""
        return self.map(lambda tensor: tensor.new_zeros(rows, *tensor.shape[1:]))

    def with_gradients_of(self, keys: set[MatrixKey]) -> "LevelState":
        """The state with a gradient of 0 for those of these matrices that have no open period."""
        gradients = dict(self.gradients)
        for key in keys - gradients.keys():
            gradients[key] = torch.zeros_like(self.deltas[key])
        return self._replace(gradients=gradients)

    @property
    def counts(self) -> NamedTensors:
        """Steps of each row and level [B, L], and periods that ended without one, by reason."""
        return {
            "steps": self.steps,
            "skipped_gate": self.skipped[..., GATED],
            "skipped_not_finite": self.skipped[..., NOT_FINITE],
        }

    def drifts(self, norms: ByMatrix) -> Tensor:
        """Largest norm of a difference of each row and level [B, L], relative to its matrix's in `norms`."""
        largest = torch.zeros_like(self.losses)
        for key, delta in self.deltas.items():
            norm = torch.linalg.vector_norm(delta, dim=(1, 2))
            drift = (norm / norms[key]).to(largest)
            largest_of_level = largest[:, key.level]
            largest_of_level.copy_(largest_of_level.maximum(drift))
        return largest

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.named_tensors().values())


class LearnedLevels(CachePart):
    """What levels have learned, as a part of a cache; `state` is `None` before they learn."""

    def __init__(self):
        self.reset()

    def reset(self) -> None:
        """Drop what levels have learned."""
        self.state: LevelState | None = None

    def crop(self, *args) -> None:
        """What was learned from tokens stays when they are cropped."""

    def map(self, function: TensorFunction) -> None:
        """Apply `function` to every tensor."""
        if self.state is not None:
            self.state = self.state.map(function)

    def named_tensors(self, level_dtype: str = "float32") -> NamedTensors:
        """The tensors of the state, the matrices in `level_dtype`."""
        return {} if self.state is None else self.state.named_tensors(level_dtype)

    def load(self, tensors: NamedTensors) -> None:
        """Restore the result of `named_tensors`."""
        if tensors:
            self.state = LevelState.of_named(tensors)

    def add_padding(self, columns: int) -> None:
        """Nothing is learned from padding."""

    def keep_columns(self, real: Tensor) -> None:
        """Nothing was learned from padding."""

    def append_rows(self, others: Sequence["LearnedLevels"], rows: Sequence[int]) -> None:
        """Append the rows of others; what a part has not learned is 0."""
        parts = [self, *others]
        learned = None
        open_periods = set()
        for part in parts:
            if part.state is not None:
                learned = part.state
                open_periods.update(learned.gradients)
        if learned is None:
            return
        for part, number in zip(parts, rows, strict=True):
            if part.state is None:
                part.state = learned.zeros(number)
            part.state = part.state.with_gradients_of(open_periods)
        super().append_rows(others, rows)
