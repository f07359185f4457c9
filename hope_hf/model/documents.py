"""Documents and padding of a call, as masks, positions or boundaries give them.

Documents that share a row are given as `position_ids` that restart at 0, as numbers in the attention mask (1, 1, 2, 2,
0: padding), or as packing collators give them: `cu_seq_lens_q` and `cu_seq_lens_k` of flash attention, `cu_seqlens` of
fla, `seq_idx` of Mamba-2. All layers read positions, so the other forms are converted to positions.

Axes: B row, T token of the call.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


class Documents(NamedTuple):
    """Padding and documents of a call, for every layer."""

    # 0 for padding [B, T], or `None` without padding
    padding: torch.Tensor | None
    # [B or 1, T], 0 at the first token of a document; `None` if the call gives neither positions nor documents
    position_ids: torch.Tensor | None


def boundaries_of(arguments: Mapping) -> dict[str, torch.Tensor]:
    """The `BOUNDARIES` of documents among the arguments, by name."""
    return {name: arguments[name] for name in BOUNDARIES if arguments.get(name) is not None}


def read_documents(
    columns: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    boundaries: dict[str, torch.Tensor],
    hidden_states: torch.Tensor,
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
    shape = hidden_states.shape[:2]
    _check_positions(position_ids, shape[1])
    padding, numbers = (None, None) if columns is None else _split_mask(columns)
    if numbers is None and not boundaries:
        return Documents(padding, position_ids)
    names = [*boundaries]
    if numbers is not None:
        names.append("attention_mask")
    _check_cache_takes_documents(cache, names)
    valid = padding
    if padding is None:
        valid = torch.ones(shape, dtype=torch.bool, device=hidden_states.device)
    valid = valid.bool()
    positions = {}
    for name, value in boundaries.items():
        begins = _begins(name, torch.as_tensor(value), shape).to(hidden_states.device)
        positions[name] = _positions(begins, valid)
    if numbers is not None:
        positions["attention_mask"] = _positions(_begins_of_numbers(numbers), valid)
    if not torch.compiler.is_compiling():
        _check_agreement(positions, position_ids, valid)
    return Documents(padding, positions[names[0]])


def _check_positions(position_ids: torch.Tensor | None, length: int) -> None:
    if position_ids is not None and (position_ids.ndim != 2 or position_ids.shape[1] != length):
        raise ValueError(
            f"position_ids has the shape {tuple(position_ids.shape)}, and (batch, {length}) is needed: give those "
            "of a single text as position_ids[None]"
        )


def _check_cache_takes_documents(cache: Cache | None, names: list[str]) -> None:
    """ValueError if a cache cannot be told of documents by the arguments of these names."""
    if cache is not None and (cache.is_compileable or cache.get_seq_length()):
        raise ValueError(
            f"{' and '.join(names)} cannot tell documents to a cache that has read tokens, or is a "
            f"{type(cache).__name__} of fixed length: give position_ids that restart at 0, or an empty "
            "HopeCache(model.config)"
        )


def mask_of_call(
    attention_mask: torch.Tensor | dict | None, shape: tuple[int, int], cache: Cache | None, has_state: bool
) -> torch.Tensor | None:
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
        check_mask(attention_mask, *shape, seen=0 if cache is None else cache.get_seq_length())
    elif getattr(attention_mask, "ndim", None) != 2:
        attention_mask = None
    return None if attention_mask is None else attention_mask[:, -shape[1] :]


def _split_mask(columns: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Padding [B, T], and the numbers of documents [B, T]; `None` for what a mask does not have.

    Unlike in transformers' mask for recurrent models, a single token may be padding, on which a chunked prefill can
    end. A compiled or exported graph must work for every mask.
    """
    if torch.compiler.is_compiling():
        # the graph has no documents; the mask of a generated token comes from `generate`
        if columns.shape[1] > 1 and columns.dtype != torch.bool:
            is_binary = ((columns == 0) | (columns == 1)).all()
            torch._assert_async(is_binary, "attention_mask must hold 0 and 1 alone in a compiled graph")
        return columns, None
    if bool((columns == 1).all()):
        return None, None
    if columns.dtype == torch.bool or not check_mask_values(columns):
        return columns, None
    is_token = columns > 0
    return None if bool(is_token.all()) else is_token, columns


def _check_agreement(
    positions: dict[str, torch.Tensor], position_ids: torch.Tensor | None, valid: torch.Tensor
) -> None:
    """ValueError if two arguments, whose positions [B, T] are given by name, begin documents at other tokens."""
    first = next(iter(positions))
    starts = (positions[first] == 0) & valid
    disagreements = {}
    for name, other in positions.items():
        if name != first:
            disagreements[name] = starts != ((other == 0) & valid)
    if position_ids is not None:
        # positions may also go on through all documents of a row
        disagreements["position_ids"] = (position_ids == 0) & valid & ~starts
    for name, tokens in disagreements.items():
        if bool(tokens.any()):
            row, column = tokens.nonzero()[0].tolist()
            raise ValueError(
                f"{first} and {name} disagree on whether a document begins at token {column} of row {row}: give "
                "one of them"
            )


def check_mask(attention_mask: torch.Tensor, batch_size: int, query_length: int, seen: int) -> None:
    """ValueError unless a mask has one column per token, including the `seen` tokens of earlier calls."""
    shape, expected = tuple(attention_mask.shape), (batch_size, seen + query_length)
    if not isinstance(attention_mask, torch.Tensor) or len(shape) != 2:
        raise ValueError(
            f"attention_mask has the shape {shape}, and layers that keep a state read no such masks: give {expected}, "
            "with 1 for a token (or the number of its document) and 0 for padding"
        )
    if shape != expected:
        raise ValueError(
            f"attention_mask has the shape {shape}, and {expected} is needed: one row per sequence, one column for "
            f"each of the {seen} tokens read before and the {query_length} of this call"
        )


def check_mask_values(mask: torch.Tensor) -> bool:
    """Whether a mask [B, T] numbers documents; ValueError if it holds other values than whole numbers from 0.

    The call waits for the device.
    """
    least, most = (float(value) for value in mask.to(torch.float64).aminmax())
    is_whole = not mask.is_floating_point() or bool((mask == mask.round()).all())
    if least < 0 or not is_whole:
        raise ValueError(
            f"attention_mask holds values from {least:g} to {most:g}: give 1 for tokens and 0 for padding, or the "
            "number of every token's document, from 1"
        )
    return most > 1


def later_begins(padding: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Whether a document begins with a token [B, T] that is not the first of its row; see `Documents`.

    `padding` [B, C] may also hold columns before those of `position_ids` [B or 1, T].
    """
    real = padding.bool()
    return (position_ids == 0) & (real & (real.cumsum(1) > 1))[:, -position_ids.shape[1] :]


def _begins(name: str, value: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Whether a document begins with a token [B, T], from boundaries of the given name."""
    rows, length = shape
    if name == "seq_idx":
        if value.ndim != 2 or value.shape[1] != length or value.shape[0] not in (1, rows):
            raise ValueError(f"seq_idx has the shape {tuple(value.shape)}, and {tuple(shape)} is needed")
        value = value.expand(shape)
        return torch.cat([torch.ones_like(value[:, :1], dtype=torch.bool), value.diff(dim=1) != 0], dim=1)
    if value.ndim != 1 or value.is_floating_point():
        raise ValueError(
            f"{name} is a {value.dtype} tensor of shape {tuple(value.shape)}: give whole numbers, 0 and the tokens up "
            "to the end of every document"
        )
    if not torch.compiler.is_compiling():
        ends = value.tolist()
        if ends[:1] != [0] or ends[-1] != rows * length or any(a > b for a, b in pairwise(ends)):
            raise ValueError(
                f"{name} goes from {ends[:1]} to {ends[-1:]}, and it must grow from 0 to {rows * length}, the number "
                "of tokens of the input"
            )
        if not set(range(0, rows * length, length)) <= set(ends):
            raise ValueError(f"{name} has a document that goes on from one row to the next: give a single row")
    # one more entry for the end of the last document
    begins = torch.zeros(rows * length + 1, dtype=torch.bool, device=value.device)
    return begins.scatter(0, value.long(), torch.ones_like(value, dtype=torch.bool))[:-1].view(shape)


def _begins_of_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Whether a document begins with a token [B, T]: its number differs from that of the real token before it."""
    column = torch.arange(numbers.shape[1], device=numbers.device)
    real = numbers > 0
    last = torch.where(real, column, -1).cummax(1).values
    before = F.pad(last, (1, 0), value=-1)[:, :-1]
    return real & ((before < 0) | (numbers.gather(1, before.clamp(min=0)) != numbers))


def _positions(begins: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """Number of real tokens of its document before each token [B, T]; a document may begin with padding."""
    before = valid.cumsum(1) - valid.long()
    return before - torch.where(begins, before, 0).cummax(1).values
