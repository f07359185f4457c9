"""Documents and padding of a call, as masks, positions or boundaries give them.

Documents that share a row are given as `position_ids` that restart at 0, as numbers in the attention mask (1, 1, 2, 2,
0: padding), or as packing collators give them: `cu_seq_lens_q` and `cu_seq_lens_k` of flash attention, `cu_seqlens` of
fla, `seq_idx` of Mamba-2. All layers read positions, so the other forms are converted to positions.

Axes: B row, T token of the call.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


class Documents(NamedTuple):
    """Padding and documents of a call, for every layer."""

    # 1 for tokens and 0 for padding [B, T], or `None` without padding
    padding: Tensor | None
    # [B or 1, T], 0 at the first token of a document; `None` if the call gives neither positions nor documents
    position_ids: Tensor | None


def boundaries_of(arguments: Mapping) -> dict[str, Tensor]:
    """The `BOUNDARIES` of documents among the arguments, by name."""
    boundaries = {}
    for name in BOUNDARIES:
        if arguments.get(name) is not None:
            boundaries[name] = arguments[name]
    return boundaries


def read_documents(
    columns: Tensor | None,
    position_ids: Tensor | None,
    boundaries: dict[str, Tensor],
    hidden_states: Tensor,
    cache: Cache | None,
) -> Documents:
    """Padding and positions of a call.

    Args:
        columns: the call's part of the attention mask [B, T] (`mask_of_call`), or `None`.
        position_ids: [B or 1, T], or `None`.
        boundaries: the result of `boundaries_of`.
        hidden_states: [B, T, hidden_size].
        cache: the cache before the call.

    Raises:
        ValueError: the arguments do not fit the call, or contradict each other.
    """
    batch_size, length = hidden_states.shape[:2]
    device = hidden_states.device
    if position_ids is not None and (position_ids.ndim != 2 or position_ids.shape[1] != length):
        raise ValueError(
            f"position_ids has the shape {tuple(position_ids.shape)}, and (batch, {length}) is needed: give those "
            "of a single text as position_ids[None]"
        )
    padding = numbers = None
    if columns is not None:
        padding, numbers = _split_mask(columns)
    if numbers is None and not boundaries:
        return Documents(padding, position_ids)
    names = [*boundaries]
    if numbers is not None:
        names.append("attention_mask")
    _check_cache_takes_documents(cache, names)
    if padding is None:
        real = torch.ones(batch_size, length, dtype=torch.bool, device=device)
    else:
        real = padding.bool()
    positions = {}
    for name, value in boundaries.items():
        boundary = torch.as_tensor(value)
        if name == "seq_idx":
            begins = _begins_of_indices(boundary, batch_size, length)
        else:
            begins = _begins_of_ends(name, boundary, batch_size, length)
        positions[name] = _positions(begins.to(device), real)
    if numbers is not None:
        positions["attention_mask"] = _positions(_begins_of_numbers(numbers), real)
    if not torch.compiler.is_compiling():
        _check_agreement(positions, position_ids, real)
    return Documents(padding, positions[names[0]])


def _check_cache_takes_documents(cache: Cache | None, names: list[str]) -> None:
    """ValueError if a cache cannot go on with documents that the arguments of these names give."""
    if cache is not None and (cache.is_compileable or cache.get_seq_length()):
        raise ValueError(
            f"{' and '.join(names)} cannot tell documents to a cache that has read tokens, or is a "
            f"{type(cache).__name__} of fixed length: give position_ids that restart at 0, or an empty "
            "HopeCache(model.config)"
        )


def mask_of_call(
    attention_mask: Tensor | dict | None, shape: tuple[int, int], cache: Cache | None, has_state: bool
) -> Tensor | None:
    """The columns [B, T] of a call's attention mask that belong to its own tokens; `None` for other masks.

    Args:
        attention_mask: [B, columns seen + T], a mask of another shape for softmax attention, or the masks that
            `generate` makes for a cache of fixed length.
        shape: (B, T).
        has_state: whether layers keep a state and need a mask of columns.
    """
    if isinstance(attention_mask, dict):
        attention_mask = attention_mask.get("columns")
    elif attention_mask is not None and has_state:
        seen = 0 if cache is None else cache.get_seq_length()
        check_mask(attention_mask, *shape, seen=seen)
    elif getattr(attention_mask, "ndim", None) != 2:
        attention_mask = None
    if attention_mask is None:
        return None
    length = shape[1]
    return attention_mask[:, -length:]


def _split_mask(columns: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Padding [B, T], and the numbers of documents [B, T]; `None` for what a mask does not have.

    Unlike in transformers' mask for recurrent models, a single token may be padding, on which a chunked prefill can
    end. A compiled or exported graph must work for every mask.
    """
    if torch.compiler.is_compiling():
        # the graph has no documents; the mask of a generated token comes from `generate`
        if columns.shape[1] > 1 and columns.dtype != torch.bool:
            is_binary = (columns == 0) | (columns == 1)
            torch._assert_async(is_binary.all(), "attention_mask must hold 0 and 1 alone in a compiled graph")
        return columns, None
    if bool((columns == 1).all()):
        return None, None
    has_numbers = columns.dtype != torch.bool and check_mask_values(columns)
    if not has_numbers:
        return columns, None
    real = columns > 0
    padding = None if bool(real.all()) else real
    return padding, columns


def _check_agreement(positions: dict[str, Tensor], position_ids: Tensor | None, real: Tensor) -> None:
    """ValueError if two arguments, whose positions [B, T] are given by name, begin documents at other tokens."""
    first, *others = positions
    starts = (positions[first] == 0) & real
    disagreements = {}
    for name in others:
        other_starts = (positions[name] == 0) & real
        disagreements[name] = starts != other_starts
    if position_ids is not None:
        # positions may also go on through all documents of a row
        begins = (position_ids == 0) & real
        disagreements["position_ids"] = begins & ~starts
    for name, tokens in disagreements.items():
        if bool(tokens.any()):
            row, column = tokens.nonzero()[0].tolist()
            raise ValueError(
                f"{first} and {name} disagree on whether a document begins at token {column} of row {row}: give "
                "one of them"
            )


def check_mask(attention_mask: Tensor, batch_size: int, query_length: int, seen: int) -> None:
    """ValueError unless a mask has one column per token, including the `seen` tokens of earlier calls."""
    shape = tuple(attention_mask.shape)
    expected = (batch_size, seen + query_length)
    if not isinstance(attention_mask, Tensor) or len(shape) != 2:
        raise ValueError(
            f"attention_mask has the shape {shape}, and layers that keep a state read no such masks: give {expected}, "
            "with 1 for a token (or the number of its document) and 0 for padding"
        )
    if shape != expected:
        raise ValueError(
            f"attention_mask has the shape {shape}, and {expected} is needed: one row per sequence, one column for "
            f"each of the {seen} tokens read before and the {query_length} of this call"
        )


def check_mask_values(mask: Tensor) -> bool:
    """Whether a mask [B, T] numbers documents; ValueError if it holds other values than whole numbers from 0.

    The call waits for the device.
    """
    least, most = map(float, mask.to(torch.float64).aminmax())
    is_whole = True
    if mask.is_floating_point():
        is_whole = bool((mask == mask.round()).all())
    if least < 0 or not is_whole:
        raise ValueError(
            f"attention_mask holds values from {least:g} to {most:g}: give 1 for tokens and 0 for padding, or the "
            "number of every token's document, from 1"
        )
    return most > 1


def later_begins(padding: Tensor, position_ids: Tensor) -> Tensor:
    """Whether a document begins with a token [B, T] that is not the first of its row; see `Documents`.

    `padding` [B, C] may also hold columns before those of `position_ids` [B or 1, T].
    """
    real = padding.bool()
    is_later = real & (real.cumsum(1) > 1)
    length = position_ids.shape[1]
    return (position_ids == 0) & is_later[:, -length:]


def _begins_of_indices(seq_idx: Tensor, batch_size: int, length: int) -> Tensor:
    """Whether a document begins with a token [B, T]: its index [B or 1, T] differs from that of the token before."""
    shape = tuple(seq_idx.shape)
    if shape not in ((1, length), (batch_size, length)):
        raise ValueError(f"seq_idx has the shape {shape}, and {(batch_size, length)} is needed")
    seq_idx = seq_idx.expand(batch_size, length)
    first = torch.ones_like(seq_idx[:, :1], dtype=torch.bool)
    differs = seq_idx.diff(dim=1) != 0
    return torch.cat([first, differs], dim=1)


def _begins_of_ends(name: str, ends: Tensor, batch_size: int, length: int) -> Tensor:
    """Whether a document begins with a token [B, T]: 0 and the end of every document of the rows in a line [N]."""
    tokens = batch_size * length
    if ends.ndim != 1 or ends.is_floating_point():
        raise ValueError(
            f"{name} is a {ends.dtype} tensor of shape {tuple(ends.shape)}: give whole numbers, 0 and the tokens up "
            "to the end of every document"
        )
    if not torch.compiler.is_compiling():
        numbers = ends.tolist()
        if numbers[:1] != [0] or numbers[-1] != tokens or numbers != sorted(numbers):
            raise ValueError(
                f"{name} goes from {numbers[:1]} to {numbers[-1:]}, and it must grow from 0 to {tokens}, the number "
                "of tokens of the input"
            )
        starts_of_rows = set(range(0, tokens, length))
        if not starts_of_rows <= set(numbers):
            raise ValueError(f"{name} has a document that goes on from one row to the next: give a single row")
    # one more entry for the end of the last document
    begins = torch.zeros(tokens + 1, dtype=torch.bool, device=ends.device)
    is_end = torch.ones_like(ends, dtype=torch.bool)
    begins = begins.scatter(0, ends.long(), is_end)
    return begins[:-1].view(batch_size, length)


def _begins_of_numbers(numbers: Tensor) -> Tensor:
    """Whether a document begins with a token [B, T]: its number differs from that of the real token before it."""
    length = numbers.shape[1]
    column = torch.arange(length, device=numbers.device)
    real = numbers > 0
    last_real = torch.where(real, column, -1).cummax(1).values
    real_before = F.pad(last_real, (1, -1), value=-1)
    number_before = numbers.gather(1, real_before.clamp(min=0))
    differs = number_before != numbers
    is_first = real_before < 0
    return real & (is_first | differs)


def _positions(begins: Tensor, real: Tensor) -> Tensor:
    """Number of real tokens of its document before each token [B, T]; a document may begin with padding."""
    before = real.cumsum(1) - real.long()
    before_document = torch.where(begins, before, 0).cummax(1).values
    return before - before_document
