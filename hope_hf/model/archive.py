"""The tokens that a cache has read: an archive that grows and is never rewritten.

It is the slowest level of a continuum: memories and levels compress what they read, and the archive keeps the words,
so that a passage can be read again (`recall.py`). It takes 4 bytes a token, and 3 in a file if ids fit into 16 bits.

Axes: B row, T column of the cache, N column of a call.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .cache_parts import CachePart, NamedTensors, TensorFunction

# A column without a token: padding, or an embedding that was given instead of one.
EMPTY = -1
# Added to the id of a document's first token.
BEGINS = 1 << 30
# EMPTY in a file of 16 bits.
_EMPTY_16 = (1 << 16) - 1


class Archive(CachePart):
    """The tokens of every row, as a part of a cache.

    Attributes:
        vocab_size: of the model.
        is_kept: whether tokens are archived; an archive that was off knows nothing of what was read.
    """

    def __init__(self, vocab_size: int, is_kept: bool = True):
        self.vocab_size = vocab_size
        self.is_kept = is_kept
        self.reset()

    def reset(self) -> None:
        """Drop all tokens."""
        # [B, T] of int32. It is replaced, never changed, so that snapshots share it.
        self._tokens: Tensor | None = None
        self._begins_a_document = False

    def stop(self) -> None:
        """Drop all tokens, and keep none from now on."""
        self.is_kept = False
        self.reset()

    def begin_document(self) -> None:
        """Take the tokens that are added next for a document of their own, such as another file."""
        self._begins_a_document = True

    def add(
        self,
        input_ids: Tensor | None,
        hidden_states: Tensor,
        padding: Tensor | None,
        position_ids: Tensor | None,
    ) -> None:
        """Archive the tokens of a call.

        Args:
            input_ids: [B, N], or `None` if the call was given embeddings.
            hidden_states: [B, N, hidden_size].
            padding: [B, N], 0 for padding; `None` without padding.
            position_ids: [B or 1, N], 0 at the first token of a document; `None` if the call tells no documents.
        """
        if not self.is_kept:
            return
        if input_ids is None:
            rows, columns, _ = hidden_states.shape
            tokens = hidden_states.new_full((rows, columns), EMPTY, dtype=torch.int32)
        else:
            # a copy, since the caller may reuse the tensor
            tokens = input_ids.to(torch.int32, copy=True)
            if position_ids is not None:
                tokens = torch.where(position_ids == 0, tokens + BEGINS, tokens)
            if padding is not None:
                tokens = torch.where(padding.bool(), tokens, EMPTY)
        if self._begins_a_document:
            # a row that begins with padding begins a document anyway
            begin = tokens[:, :1]
            is_marked = (begin == EMPTY) | (begin >= BEGINS)
            begin += torch.where(is_marked, 0, BEGINS)
            self._begins_a_document = False
        if self._tokens is not None:
            # a cache from a file is on the CPU
            earlier = self._tokens.to(tokens.device)
            tokens = torch.cat([earlier, tokens], dim=1)
        self._tokens = tokens

    @property
    def tokens(self) -> Tensor:
        """All columns [B, T], int32; [0, 0] before the first token.

        EMPTY for a column without a token, otherwise the id of its token; 2^30 more at a document's first one.
        """
        if self._tokens is None:
            return torch.empty(0, 0, dtype=torch.int32)
        return self._tokens

    def is_begin_of(self, input_ids: Tensor) -> bool:
        """Whether rows [B, N] of tokens begin with those of the archive, whose rows are B or a multiple of it.

        A column without a token equals every token.
        """
        tokens = self.tokens.to(input_ids.device)
        rows, columns = tokens.shape
        # beams and samples of a text share its row
        copies = max(1, rows // len(input_ids))
        begin = input_ids[:, :columns].repeat_interleave(copies, dim=0)
        if begin.shape != tokens.shape:
            return False
        ids = tokens % BEGINS
        is_equal = (ids == begin) | (tokens == EMPTY)
        return bool(is_equal.all())

    @property
    def holds_tokens(self) -> bool:
        """Whether any column has a token."""
        is_token = self.tokens != EMPTY
        return bool(is_token.any())

    def map(self, function: TensorFunction) -> None:
        """Apply `function` to the tokens [B, T]."""
        if self._tokens is not None:
            self._tokens = function(self._tokens)

    def crop(self, *args) -> None:
        """The cache crops the archive to the columns that its layers keep."""

    def crop_to(self, columns: int) -> None:
        """Keep the first columns."""
        self.map(lambda tokens: tokens[:, :columns])

    def add_padding(self, columns: int) -> None:
        """Put columns without a token in front."""
        self.map(lambda tokens: F.pad(tokens, (columns, 0), value=EMPTY))

    def keep_columns(self, real: Tensor) -> None:
        """Keep the columns `real` [T]."""
        self.map(lambda tokens: tokens[:, real.to(tokens.device)])

    def append_rows(self, others: Sequence["Archive"], rows: Sequence[int]) -> None:
        """Append the rows of others; if one of them is off, nothing is kept."""
        parts = []
        for archive in (self, *others):
            if not archive.is_kept:
                self.stop()
                return
            # a cache from a file is on the CPU
            parts.append(archive.tokens.to(self.tokens.device))
        self._tokens = torch.cat(parts)

    def named_tensors(self, level_dtype: str = "float32") -> NamedTensors:
        """The tokens for a file: `tokens` [B, T] of uint16 and `begins` [B, T], whether a document begins, of bool.

        If an id does not fit into 16 bits, it is one tensor `tokens` of int32.
        """
        if self._tokens is None:
            return {}
        tokens = self._tokens
        begins = tokens >= BEGINS
        ids = torch.where(begins, tokens - BEGINS, tokens)
        # asked of the ids, since a vocabulary may have grown; on the meta device they have no values
        is_wide = ids >= _EMPTY_16
        if not tokens.is_meta and is_wide.any():
            return {"tokens": tokens}
        ids = torch.where(ids == EMPTY, _EMPTY_16, ids)
        return {"tokens": ids.to(torch.uint16), "begins": begins}

    def load(self, tensors: NamedTensors) -> None:
        """Restore the result of `named_tensors`."""
        if not tensors:
            return
        tokens = tensors["tokens"].to(torch.int32)
        if "begins" in tensors:
            tokens = torch.where(tokens == _EMPTY_16, EMPTY, tokens)
            tokens = torch.where(tensors["begins"], tokens + BEGINS, tokens)
        self._tokens = tokens

    def load_empty(self, shape: tuple[int, int]) -> None:
        """Rows and columns without tokens: what a cache of before has read is not known."""
        self._tokens = torch.full(shape, EMPTY, dtype=torch.int32)

    def load_checked(self, tensors: NamedTensors, shape: tuple[int, int]) -> None:
        """Restore the tensors of a file.

        Args:
            tensors: of the file, without any if it has no archive: then its columns have no tokens.
            shape: rows and columns that the cache has read.

        Raises:
            ValueError: the tensors are not those of such an archive.
        """
        if not tensors:
            self.load_empty(shape)
            return
        forms = [
            {"tokens": (torch.int32, shape)},
            {"tokens": (torch.uint16, shape), "begins": (torch.bool, shape)},
        ]
        form = {}
        for name, tensor in tensors.items():
            form[name] = tensor.dtype, tuple(tensor.shape)
        if form not in forms:
            raise ValueError("holds an archive of other tokens than the cache has read")
        self.load(tensors)
        tokens = self.tokens
        ids = tokens[tokens != EMPTY] % BEGINS
        is_unknown = ids >= self.vocab_size
        if tokens.min() < EMPTY or is_unknown.any():
            raise ValueError("holds an archive with tokens that the model does not have")


def documents_of(tokens: Tensor) -> list[tuple[int, list[int]]]:
    """The documents of a row [T] of an archive: the column of each one's first token, and its token ids.

    Behind a column without a token, a document begins.
    """
    documents = []
    ids = None
    for column, token in enumerate(tokens.tolist()):
        if token == EMPTY:
            ids = None
            continue
        if token >= BEGINS or ids is None:
            ids = []
            documents.append((column, ids))
        ids.append(token % BEGINS)
    return documents
