"""The cache of a HOPE model: its parts (`cache_parts.py`) forked, rolled back, joined, split, and kept as a file."""

import copy
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.utils.deprecation import deprecate_kwarg

from .archive import Archive
from .cache_file import CACHE_FILE, check_tensors, checksum_in, fingerprint, is_of, read_cache, write_cache
from .cache_parts import (
    LEVEL_DTYPES,
    CachePart,
    HopeMemoryLayer,
    HopeStaticMemoryLayer,
    KeyValuePart,
    LearnedLevels,
    LevelState,
    NamedTensors,
    Rows,
    TensorFunction,
    is_memory_layer,
)
from .chunks import Past
from .level_learning import loaded_state
from .recall import Passage, PassageIndex, check_search

# What this transformers calls a cache in calls and outputs: `past_key_values` before 5.24.
CACHE_NAME = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"
# A function that takes `cache` takes `past_key_values`, too: in silence where that is transformers' own name.
takes_cache = deprecate_kwarg("past_key_values", "5.40.0" if CACHE_NAME == "cache" else "5.0.0", new_name="cache")


def past_of(cache: Cache | None) -> Past | None:
    """Counts of the tokens that a cache's memories have read."""
    if cache is not None:
        for layer in cache.layers:
            if is_memory_layer(layer):
                return layer.past
    return None


def layers_written_after(cache: Cache) -> list[HopeMemoryLayer | KeyValuePart] | None:
    """Layers of a cache into which blocks do not write, so that blocks can be recomputed; `None` if it has others."""
    if cache.is_compileable or getattr(cache, "offloading", False):
        return None
    layers = []
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer = KeyValuePart(layer)
        if not hasattr(layer, "update_state"):
            return None
        layers.append(layer)
    return layers


class Snapshot(NamedTuple):
    """What `HopeCache.rollback` needs: copies of the layers, and of the other parts by name."""

    layers: list[CacheLayerMixin]
    others: dict[str, CachePart]

    @classmethod
    def of(cls, layers: list[CacheLayerMixin], others: dict[str, CachePart]) -> "Snapshot":
        """A snapshot with copies of these parts."""
        copied_others = {}
        for name, part in others.items():
            copied_others[name] = copy.copy(part)
        return cls(list(map(copy.copy, layers)), copied_others)

    @property
    def levels(self) -> LevelState | None:
        """What levels had learned."""
        return self.others["levels"].state


class HopeCache(Rows, DynamicCache):
    """Cache of a HOPE model: `cache` of its `forward` and of `generate`, which transformers below 5.24 calls
    `past_key_values`.

    It has a `HopeMemoryLayer` for every layer with memories or sparse attention, and a growing key-value layer for
    softmax attention. `levels` is what levels have learned from each row's text, `None` before they learn.
    `copy.deepcopy` forks the cache, `snapshot` and `rollback` go back to an earlier token, `joined` and `split` make a
    batch of several caches and caches of a batch, `save_pretrained` and `from_pretrained` keep it as a file.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeCache, HopeConfig, HopeForCausalLM
    >>> model = HopeForCausalLM(HopeConfig(vocab_size=100, hidden_size=64, num_hidden_layers=2)).eval()
    >>> cache = HopeCache(model.config)
    >>> out = model(torch.tensor([[1, 2, 3]]), cache=cache)
    >>> before = cache.snapshot()
    >>> logits = model(torch.tensor([[4, 5]]), cache=cache).logits
    >>> cache.rollback(before).get_seq_length()
    3
    >>> torch.equal(model(torch.tensor([[4, 5]]), cache=cache).logits, logits)
    True
    ```
    """

    # the folder of the file that this cache was read from or written to, and that file's checksum
    _read_from: tuple[Path, str | None] | None = None

    def __init__(self, config: PreTrainedConfig, archive: bool = True):
        """`archive`: whether to keep the tokens that are read, for `recall`: 4 bytes a token."""
        super().__init__(config=config)
        # the parts besides the layers, by the prefix of their tensors in a file
        self.others: dict[str, CachePart] = {
            "levels": LearnedLevels(),
            "archive": Archive(config.vocab_size, archive),
        }
        # of `recall`, by row and length of a passage
        self._indices: dict[tuple[int, int], PassageIndex] = {}

    @property
    def parts(self) -> dict[str, CachePart]:
        """All parts by the prefix of their tensors in a file: the layers by number, and the others by name."""
        parts = dict(self.others)
        for index, layer in enumerate(self.layers):
            parts[str(index)] = layer if is_memory_layer(layer) else KeyValuePart(layer)
        return parts

    @property
    def levels(self) -> LevelState | None:
        """What levels have learned."""
        return self.others["levels"].state

    @levels.setter
    def levels(self, state: LevelState | None) -> None:
        self.others["levels"].state = state

    @property
    def archive(self) -> Archive:
        """The tokens that were read."""
        return self.others["archive"]

    def __copy__(self) -> "HopeCache":
        """Another cache with the same tensors."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__getstate__())
        return other.rollback(self.snapshot())

    def __getstate__(self) -> dict:
        # a database cannot be pickled or copied: another cache makes its own
        return self.__dict__ | {"_indices": {}}

    def __deepcopy__(self, memo: dict) -> "HopeCache":
        if any(tensor.grad_fn is not None for tensor in self.state_tensors().values()):
            raise ValueError(
                "the cache carries the graph of the text it has read, which cannot be copied: read under "
                "torch.no_grad(), or call detach_() before copying"
            )
        memo[id(self)] = fork = type(self).__new__(type(self))
        fork.__dict__.update(copy.deepcopy(self.__getstate__(), memo))
        return fork

    def snapshot(self) -> Snapshot:
        """A snapshot for `rollback`. It copies no tensor, since new tokens make new tensors."""
        return Snapshot.of(self.layers, self.others)

    def rollback(self, snapshot: Snapshot) -> "HopeCache":
        """Return to a snapshot of this cache, in place; the snapshot can be used again."""
        if list(map(type, snapshot.layers)) != list(map(type, self.layers)):
            raise ValueError("the snapshot is of a cache with other layers: roll back the cache it was taken of")
        self.layers, self.others = Snapshot.of(*snapshot)
        return self

    def map(self, function: TensorFunction) -> "HopeCache":
        """Apply `function` to every tensor, in place."""
        for part in self.parts.values():
            part.map(function)
        return self

    def detach_(self) -> "HopeCache":
        """Detach all tensors in place: truncated backpropagation through time."""
        return self.map(Tensor.detach)

    def to(self, device: torch.device | str | int | None) -> "HopeCache":
        """Move every tensor to a device, in place; `None`, as accelerate's hooks call it, moves nothing."""
        if device is None:
            return self
        for layer in self.layers:
            if layer.is_initialized:
                layer.device = torch.device(device)
        return self.map(lambda tensor: tensor.to(device))

    def reset(self) -> None:
        """Return to the state before the first token."""
        for part in self.parts.values():
            part.reset()

    def reset_levels(self) -> "HopeCache":
        """Drop what levels have learned; the text stays read."""
        self.levels = None
        return self

    def crop(self, *args) -> None:
        """As in transformers; RuntimeError, before anything is cropped, if a layer keeps a state."""
        # layers with a state first, since they raise
        for part in sorted(self.parts.values(), key=lambda part: not is_memory_layer(part)):
            part.crop(*args)
        self.archive.crop_to(int(self.get_seq_length()))

    def recall(
        self,
        question: str,
        tokenizer: PreTrainedTokenizerBase,
        tokens: int = 64,
        pieces: int = 2,
        row: int = 0,
        stop: int | None = None,
    ) -> list[Passage]:
        """The passages of what was read that fit a question best, the best one first; none if no word of it was read.

        The first call builds an index of the text (about a second for a million tokens), and later ones add what was
        read since.

        Args:
            question: in the words of the text: the search knows no other ones (`recall.py`).
            tokenizer: of the model.
            tokens: the longest passage.
            pieces: the most passages.
            row: of the cache.
            stop: only the columns before it are searched; `None`: the whole text.

        Raises:
            ValueError: nothing was read, or archived; another tokenizer; no such row; Python's SQLite cannot search.
        """
        check_search(question, tokenizer, tokens, pieces)
        columns = self.archive.tokens
        if not self.archive.is_kept:
            raise ValueError("the cache keeps no archive to recall from: make it with HopeCache(config, archive=True)")
        if not columns.numel():
            raise ValueError("the cache has read nothing that it could recall: give it to the model with a text first")
        if row not in range(len(columns)):
            raise ValueError(f"row is {row}, and the cache has {len(columns)}: give one of 0 to {len(columns) - 1}")
        searched = columns[row, :stop].cpu()
        # taken out, since one whose growth is interrupted cannot be used
        index = self._indices.pop((row, tokens), None)
        if index is None or not index.is_of(tokenizer, searched):
            index = PassageIndex(tokenizer, tokens)
        index.grow(searched)
        self._indices[row, tokens] = index
        return index.search(question, pieces)

    @property
    def num_sequences(self) -> int:
        """Sequences that the cache holds; 0 before the first token."""
        for name, tensor in self.state_tensors().items():
            # of `columns` every layer has two, whatever the number of rows
            if not name.endswith(".columns"):
                return len(tensor)
        return 0

    @classmethod
    def joined(
        cls, caches: Sequence["HopeCache"], attention_masks: Sequence[Tensor] | None = None
    ) -> tuple["HopeCache", Tensor]:
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
        needed = list(map(HopeCache._shape, caches))
        lengths = [columns for _, columns in needed]
        if not lengths or not min(lengths):
            raise ValueError("joined takes caches that have read a text: give at least one, and none that is empty")
        if attention_masks is None:
            attention_masks = [torch.ones(shape, dtype=torch.long) for shape in needed]
        shapes = [tuple(mask.shape) for mask in attention_masks]
        if shapes != needed:
            raise ValueError(f"attention_masks have the shapes {shapes}, and {needed} are needed: rows, tokens read")
        padded_caches = []
        padded_masks = []
        for cache, mask in zip(caches, attention_masks, strict=True):
            missing = max(lengths) - mask.shape[1]
            padded_caches.append(cache._with_padding(missing))
            padded_masks.append(F.pad(mask, (missing, 0)))
        joined = padded_caches[0].join(padded_caches)
        return joined, torch.cat(padded_masks)

    def _with_padding(self, columns: int) -> "HopeCache":
        """A copy that has read that many columns of padding in front."""
        padded = copy.copy(self)
        if columns:
            for part in padded.parts.values():
                part.add_padding(columns)
        return padded

    def split(self, attention_mask: Tensor | None = None) -> list["HopeCache"]:
        """A cache of every row, without padding; this one stays.

        Args:
            attention_mask: [B, columns] of all that was read, 0 for padding; `None`: there is no padding.
        """
        needed = self._shape()
        if attention_mask is None:
            attention_mask = torch.ones(needed)
        if attention_mask.shape != needed:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, and {needed} is needed: a column for "
                "each that the cache has read"
            )
        caches = []
        for row, real in enumerate(attention_mask.bool()):
            cache = self.select([row])
            for part in cache.parts.values():
                part.keep_columns(real)
            caches.append(cache)
        return caches

    def select(self, rows: list[int]) -> "HopeCache":
        """A cache of these rows alone; this one stays."""
        return copy.copy(self).map(lambda tensor: tensor[rows])

    def join(self, caches: list["HopeCache"]) -> "HopeCache":
        """Become the rows of caches, one after the other; all have read as many columns, and may be changed."""
        rows = []
        others: dict[str, list[CachePart]] = defaultdict(list)
        for cache in caches:
            if len(cache.layers) != len(caches[0].layers):
                raise ValueError("the caches have other layers than each other: join those of one model")
            rows.append(cache.num_sequences)
            if cache is not caches[0]:
                for name, part in cache.parts.items():
                    others[name].append(part)
        self.rollback(caches[0].snapshot())
        for name, part in self.parts.items():
            part.append_rows(others[name], rows)
        return self

    def _shape(self) -> tuple[int, int]:
        """Rows and columns read."""
        return self.num_sequences, int(self.get_seq_length())

    @property
    def level_bytes(self) -> int:
        """Bytes of what levels have learned."""
        return 0 if self.levels is None else self.levels.nbytes

    @property
    def memory_layers(self) -> list[HopeMemoryLayer]:
        """The layers of self-modifying memories."""
        return [layer for layer in self.layers if is_memory_layer(layer)]

    def state_tensors(self, level_dtype: str = "float32") -> NamedTensors:
        """The cache's contents by name: batch-first tensors, and each memory's counts as two integers.

        `level_dtype` is that of what levels have learned (`LevelState.named_tensors`).
        """
        tensors = {}
        for prefix, part in self.parts.items():
            for name, tensor in part.named_tensors(level_dtype).items():
                tensors[f"{prefix}.{name}"] = tensor
        return tensors

    @classmethod
    def from_state_tensors(cls, config: PreTrainedConfig, tensors: NamedTensors) -> "HopeCache":
        """The cache with these `state_tensors`."""
        cache = cls(config)
        tensors = dict(tensors)
        for prefix, part in cache.parts.items():
            contents = _popped(tensors, f"{prefix}.")
            if is_memory_layer(part) and "columns" not in contents:
                raise ValueError(f"the saved memory has no layer {prefix}: it belongs to a model with fewer layers")
            part.load(contents)
        if not cache.archive.tokens.numel() and cache.get_seq_length():
            cache.archive.load_empty(cache._shape())
        return cache

    def save_pretrained(
        self, save_directory: str | Path, model: PreTrainedModel, level_dtype: str = "float32"
    ) -> None:
        """Write `hope_cache.safetensors` into a folder: tensors, a checksum, and the model's fingerprint.

        Args:
            save_directory: created if it does not exist; a cache in it is replaced, unless it was
                replaced since this one was read from there.
            model: the HOPE model of the cache, also in a `PeftModel`, with the adapters active that read the text. The
                weights that it computes with are hashed, and those adapters (see `cache_file.fingerprint`).
            level_dtype: of what levels have learned: "float32" stores it as it is, "bfloat16" and "int8" take a half
                and a quarter of the space.

        Raises:
            ValueError: nothing was read yet, the memories hold NaN or infinity, another dtype, or the file in the
                folder is not the one that this cache was read from.
        """
        model = _without_peft(model)
        if not self.get_seq_length():
            raise ValueError("the cache has read nothing: give it to the model with a text, then save it")
        if level_dtype not in LEVEL_DTYPES:
            raise ValueError(f"level_dtype is '{level_dtype}': choose one of {', '.join(LEVEL_DTYPES)}")
        if self.levels is not None and model.config.level_learning is None:
            raise ValueError("the cache holds what levels have learned, and `level_learning` is None: set it back")
        folder = Path(save_directory)
        origin, checksum = self._read_from or (None, None)
        if folder.resolve() == origin and checksum_in(folder) not in (None, checksum):
            raise ValueError(
                f"{folder / CACHE_FILE} was replaced since this cache was read from it: save to another folder"
            )
        learning = None if self.levels is None else asdict(model.config.level_learning)
        write_cache(folder, self.state_tensors(level_dtype), fingerprint(model), learning)
        self._read_from = folder.resolve(), checksum_in(folder)

    @staticmethod
    def checksum_in(directory: str | Path) -> str | None:
        """The checksum of the cache that `save_pretrained` wrote into a folder; `None` if there is none.

        It tells whether the file has been replaced, and its tensors are not read.
        """
        return checksum_in(Path(directory))

    @classmethod
    @torch.no_grad()
    def from_pretrained(cls, directory: str | Path, model: PreTrainedModel) -> "HopeCache":
        """The cache that `save_pretrained` wrote, every layer on the device where the model computes it.

        Raises:
            ValueError: there is none, its format is another version's, it is damaged, or another model wrote it.
        """
        folder = Path(directory)
        model = _without_peft(model)
        checksum = checksum_in(folder)
        tensors, writer, learning = read_cache(folder)
        if not is_of(model, writer):
            raise ValueError(
                f"{folder / CACHE_FILE} was written by another model (or other weights of it): load it with that one"
            )
        learned = _popped(tensors, "levels.")
        archived = _popped(tensors, "archive.")
        for name in list(tensors):
            # of files of before: the archive tells which tokens were read
            if name.endswith(".digest"):
                del tensors[name]
        one_token = cls._of_one_token(model).state_tensors()
        check_tensors(folder, tensors, one_token)
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(one_token[name].device)
        cache = cls.from_state_tensors(model.config, tensors)
        try:
            if learned:
                state = LevelState.of_named(learned)
                cache.levels = loaded_state(state, learning, model, cache.num_sequences)
            cache.archive.load_checked(archived, cache._shape())
        except (KeyError, ValueError) as error:
            raise ValueError(f"{folder / CACHE_FILE} {error}") from None
        cache._read_from = folder.resolve(), checksum
        return cache

    @classmethod
    def _of_one_token(cls, model: PreTrainedModel) -> "HopeCache":
        """The cache of one token, which shows names, shapes, dtypes and devices of the model's tensors."""
        cache = cls(model.config, archive=False)
        # weights that `device_map` offloads are on the meta device, and hooks move their inputs
        device = "cpu" if model.device.type == "meta" else model.device
        model.base_model(torch.zeros(1, 1, dtype=torch.long, device=device), cache=cache)
        return cache


def _popped(tensors: NamedTensors, prefix: str) -> NamedTensors:
    """The tensors whose names have a prefix, by the names behind it; they are taken out of the dictionary."""
    popped = {}
    for name in list(tensors):
        if name.startswith(prefix):
            popped[name.removeprefix(prefix)] = tensors.pop(name)
    return popped


def _without_peft(model: PreTrainedModel) -> PreTrainedModel:
    """The model in a `PeftModel`, with its adapters in place."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


__all__ = ["HopeCache", "HopeMemoryLayer", "HopeStaticMemoryLayer"]
