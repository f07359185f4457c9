"""The rows of a cache: chosen, repeated, joined with those of other caches, and split again."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from transformers.cache_utils import CacheLayerMixin

from .level_learning import LevelState


def is_memory_layer(layer: CacheLayerMixin) -> bool:
    """Whether a cache layer is a `HopeMemoryLayer`, of this code or of another copy of it."""
    return hasattr(layer, "state_class")


class Rows:
    """Choice of rows, by a `map` that changes every batch-first tensor."""

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Keep the rows `beam_idx`, in that order."""
        self.map(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices`."""
        self.map(lambda tensor: tensor[indices.to(tensor.device)])


class CacheRows(Rows):
    """Joining and splitting, of a `HopeCache`."""

    @classmethod
    def joined(
        cls, caches: Sequence["CacheRows"], attention_masks: Sequence[torch.Tensor] | None = None
    ) -> tuple["CacheRows", torch.Tensor]:
        """A cache with the rows of several, such as those of several users, and its mask; the given ones stay.

        Rows that have read less than others have padding in front.

        Args:
            caches: of one model; each has read at least a token.
            attention_masks: [rows, columns] of each cache, 0 for padding; `None`: they have read no padding.

        Returns:
            The cache, and [B, columns], 0 for padding. The next call takes this mask, continued by its own columns.

        Raises:
            ValueError: there is no cache, one has read nothing or is of another model, or a mask has another shape.
        """
        lengths = [int(cache.get_seq_length()) for cache in caches]
        if not lengths or not min(lengths):
            raise ValueError("joined takes caches that have read a text: give at least one, and none that is empty")
        columns = max(lengths)
        needed = [(cache.num_sequences, length) for cache, length in zip(caches, lengths, strict=True)]
        if attention_masks is None:
            attention_masks = [torch.ones(shape, dtype=torch.long) for shape in needed]
        shapes = [tuple(mask.shape) for mask in attention_masks]
        if shapes != needed:
            raise ValueError(f"attention_masks have the shapes {shapes}, and {needed} are needed: rows, tokens read")
        parts, masks = [], []
        for cache, mask in zip(caches, attention_masks, strict=True):
            missing = columns - mask.shape[1]
            parts.append(cache._behind_padding(missing))
            masks.append(F.pad(mask, (missing, 0)))
        mask = torch.cat(masks)
        return parts[0].join(parts), mask

    def split(self, attention_mask: torch.Tensor | None = None) -> list["CacheRows"]:
        """A cache of every row, without padding; this one stays.

        Args:
            attention_mask: [B, columns] of all that was read, 0 for padding; `None`: there is no padding.
        """
        needed = self.num_sequences, int(self.get_seq_length())
        if attention_mask is None:
            attention_mask = torch.ones(needed)
        if attention_mask.shape != needed:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, and {needed} is needed: a column for "
                "each that the cache has read"
            )
        parts = [self.select([row]) for row in range(self.num_sequences)]
        for part, real in zip(parts, attention_mask.bool(), strict=True):
            part._keep_columns(real)
        return parts

    def select(self, rows: list[int]) -> "CacheRows":
        """A cache of these rows alone; this one stays."""
        part = self._copied()
        return part.map(lambda tensor: tensor[rows])

    def join(self, parts: list["CacheRows"]) -> "CacheRows":
        """Become the rows of `parts` one after the other; all have read as many columns."""
        _share_levels(parts)
        tensors = [part.tensors() for part in parts]
        if len(set(map(len, tensors))) > 1:
            raise ValueError("the caches have other layers than each other: join those of one model")
        rows = iter([_concatenated(same) for same in zip(*tensors, strict=True)])
        is_uniform = True
        for part in parts:
            for layer in part.memory_layers:
                is_uniform &= layer.past.is_uniform
        self.layers, self.levels = parts[0].layers, parts[0].levels
        self.map(lambda tensor: next(rows))
        for layer in self.memory_layers:
            layer.past = layer.past._replace(is_uniform=is_uniform)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """All batch-first tensors, in the order of `map`."""
        tensors = []

        def collect(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        self.map(collect)
        return tensors

    def _behind_padding(self, missing: int) -> "CacheRows":
        """A copy with that many columns of padding in front."""
        copied = self._copied()
        for layer in copied.layers if missing else ():
            if is_memory_layer(layer):
                layer.past = layer.past._replace(columns=layer.past.columns + missing, is_uniform=False)
            else:
                layer.keys = F.pad(layer.keys, (0, 0, missing, 0))
                layer.values = F.pad(layer.values, (0, 0, missing, 0))
        return copied

    def _keep_columns(self, real: torch.Tensor) -> None:
        """Keep the columns `real` [columns] of a cache of one row."""
        kept = int(real.sum())
        for layer in self.layers:
            if is_memory_layer(layer):
                is_uniform = int(layer.past.seen) == kept
                layer.past = layer.past._replace(columns=kept, is_uniform=is_uniform)
            else:
                real_of_layer = real.to(layer.keys.device)
                layer.keys = layer.keys[:, :, real_of_layer]
                layer.values = layer.values[:, :, real_of_layer]


def _concatenated(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all; blocks that sparse attention holds of some rows alone are empty in the others."""
    first = parts[0]
    if all(part.shape[1:] == first.shape[1:] for part in parts):
        return torch.cat(parts)
    longest = max(part.shape[2] if part.ndim > 3 else 0 for part in parts)
    padded = []
    for part in parts:
        if part.ndim < 4 or part.shape[1:2] + part.shape[3:] != first.shape[1:2] + first.shape[3:]:
            raise ValueError("the caches hold tensors of other shapes than each other: join those of one model")
        unchanged = (0, 0) * (part.ndim - 3)
        padded.append(F.pad(part, (*unchanged, 0, longest - part.shape[2])))
    return torch.cat(padded)


def _share_levels(parts: Sequence[CacheRows]) -> None:
    """Give all parts the same matrices and open gradients of levels; what a part has not learned is 0."""
    learned = [part.levels for part in parts if part.levels is not None]
    if not learned:
        return
    open_periods = set()
    for levels in learned:
        open_periods.update(levels.gradients)
    for part in parts:
        if part.levels is None:
            part.levels = _without_rows(learned[0], part.num_sequences)
        gradients = dict(part.levels.gradients)
        for key in open_periods - gradients.keys():
            gradients[key] = torch.zeros_like(part.levels.deltas[key])
        # the order of keys is that in which tensors are joined
        gradients = {key: gradients[key] for key in sorted(gradients)}
        part.levels = part.levels._replace(gradients=gradients)


def _without_rows(levels: LevelState, rows: int) -> LevelState:
    """The state of `rows` rows that have learned nothing."""
    return levels.map(lambda tensor: tensor.new_zeros(rows, *tensor.shape[1:]))
