"""Which tokens of a call are padding, and where documents begin: what masks, positions and boundaries say of it.

Documents that share a row are told by `position_ids` that restart at 0, by numbers in the attention mask (1, 1, 2, 2,
0: padding), or by what packing collators give: `cu_seq_lens_q` and `cu_seq_lens_k` of flash attention, `cu_seqlens` of
fla, `seq_idx` of Mamba-2. Every layer goes by the positions, so the others are turned into these.

Axes: B row, T token of the call.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from transformers.cache_utils import Cache

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "seq_idx")


class Documents(NamedTuple):
    """What every layer needs to know of padding and documents."""

    # 0 for padding [B, T], or `None` where there is none
    padding: torch.Tensor | None
    # [B or 1, T], 0 at the first token of a document; `None` where nothing was told
    position_ids: torch.Tensor | None


def boundaries_of(arguments: Mapping) -> dict[str, torch.Tensor]:
    """Those of `BOUNDARIES` that were given."""
    return {name: arguments[name] for name in BOUNDARIES if arguments.get(name) is not None}


def check_mask_values(mask: torch.Tensor) -> bool:
    """Whether a mask [B, T] numbers documents; ValueError for one that holds anything but numbers from 0.

    Waits for the device.
    """
    least, most = (float(value) for value in mask.to(torch.float64).aminmax())
    is_whole = not mask.is_floating_point() or bool((mask == mask.round()).all())
    if least < 0 or not is_whole:
        raise ValueError(
            f"attention_mask holds values from {least:g} to {most:g}: give 1 for tokens and 0 for padding, or the "
            "number of every token's document, from 1"
        )
    return most > 1


def read_documents(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    boundaries: dict[str, torch.Tensor],
    shape: tuple[int, int],
    device: torch.device,
    cache: Cache | None,
) -> Documents:
    """Padding and positions of a call.

    Args:
        attention_mask: [B, columns seen + T], or `None` where it says nothing.
        position_ids: [B or 1, T].
        boundaries: see `boundaries_of`.
        shape: (B, T).
        cache: as it is before the call.

    Raises:
        ValueError: what is given does not fit the call, or contradicts itself.
    """
    padding = numbered = None
    if attention_mask is not None:
        # Unlike in transformers' mask for recurrent models, a call of one token may be padding, too: a chunked prefill
        # can end on it. In a compiled or exported graph, which must serve every mask, any may be.
        padding = attention_mask[:, -shape[1] :]
        if torch.compiler.is_compiling():
            # which cannot lay out documents; a generated token's mask is `generate`'s own
            if shape[1] > 1 and padding.dtype != torch.bool:
                fits = ((padding == 0) | (padding == 1)).all()
                torch._assert_async(fits, "attention_mask must hold 0 and 1 alone in a compiled graph")
        elif bool((padding == 1).all()):
            padding = None
        elif padding.dtype != torch.bool and check_mask_values(padding):
            numbered = padding
            padding = None if bool((numbered > 0).all()) else numbered > 0
    if numbered is None and not boundaries:
        return Documents(padding, position_ids)
    if cache is not None and (cache.is_compileable or cache.get_seq_length()):
        told = " and ".join([*boundaries, *["attention_mask"] * (numbered is not None)])
        raise ValueError(
            f"{told} cannot tell documents to a cache that has read tokens, or is a {type(cache).__name__} of fixed "
            "length: give position_ids that restart at 0, or an empty HopeCache(model.config)"
        )
    valid = torch.ones(shape, dtype=torch.bool, device=device) if padding is None else padding.bool()
    begins = {name: _begins(name, torch.as_tensor(value), shape).to(device) for name, value in boundaries.items()}
    if numbered is not None:
        begins["attention_mask"] = _begins_of_numbers(numbered)
    positions = {name: _positions(begin, valid) for name, begin in begins.items()}
    first, told = next(iter(positions.items()))
    if not torch.compiler.is_compiling():
        starts = (told == 0) & valid
        wrong = {name: starts != ((other == 0) & valid) for name, other in positions.items() if name != first}
        if position_ids is not None:
            # Positions that count on through all documents are right, too.
            wrong["position_ids"] = (position_ids == 0) & valid & ~starts
        for name, tokens in wrong.items():
            if bool(tokens.any()):
                row, column = tokens.nonzero()[0].tolist()
                raise ValueError(
                    f"{first} and {name} disagree on whether a document begins at token {column} of row {row}: give "
                    "one of them"
                )
    return Documents(padding, told)


def later_begins(padding: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Whether a document begins with a token [B, T] that is not the first of its row; arguments as of `Documents`."""
    real = padding.bool()
    return (position_ids == 0) & real & (real.cumsum(1) > 1)


def _begins(name: str, value: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Whether a document begins with a token [B, T]."""
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
        if ends[:1] != [0] or ends[-1] != rows * length or any(a > b for a, b in zip(ends, ends[1:], strict=False)):
            raise ValueError(
                f"{name} goes from {ends[:1]} to {ends[-1:]}, and it must grow from 0 to {rows * length}, the number "
                "of tokens of the input"
            )
        if not set(range(0, rows * length, length)) <= set(ends):
            raise ValueError(f"{name} has a document that goes on from one row to the next: give a single row")
    # one more, for the end of the last document
    begins = torch.zeros(rows * length + 1, dtype=torch.bool, device=value.device)
    return begins.scatter(0, value.long(), torch.ones_like(value, dtype=torch.bool))[:-1].view(shape)


def _begins_of_numbers(numbers: torch.Tensor) -> torch.Tensor:
    """Whether a document begins with a token [B, T]: another number than that of the last token before."""
    column = torch.arange(numbers.shape[1], device=numbers.device)
    real = numbers > 0
    last = torch.where(real, column, -1).cummax(1).values
    before = torch.nn.functional.pad(last, (1, 0), value=-1)[:, :-1]
    return real & ((before < 0) | (numbers.gather(1, before.clamp(min=0)) != numbers))


def _positions(begins: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    """How many real tokens of its document come before a token [B, T]: a document may begin with padding."""
    before = valid.cumsum(1) - valid.long()
    return before - torch.where(begins, before, 0).cummax(1).values
