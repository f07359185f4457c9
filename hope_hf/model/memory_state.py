"""The state of a mixer or of a block's levels: what one call leaves to the next.

A state is a `NamedTuple` of batch-first tensors and of tuples of such tensors, so that a cache can move, reorder and
save it without knowing whose it is.
"""

from collections.abc import Callable

import torch


def map_state(function: Callable[[torch.Tensor], torch.Tensor], state: tuple) -> tuple:
    """`function(tensor)` in place of every tensor."""
    return type(state)(*(tuple(map(function, part)) if isinstance(part, tuple) else function(part) for part in state))


def named_tensors(state: tuple) -> dict[str, torch.Tensor]:
    """The tensors by name, for a file: `field`, or `field.0`, `field.1` where the field is a tuple."""
    tensors = {}
    for field, part in state._asdict().items():
        if isinstance(part, tuple):
            tensors |= {f"{field}.{index}": tensor for index, tensor in enumerate(part)}
        else:
            tensors[field] = part
    return tensors


def state_of_named(kind: type[tuple], tensors: dict[str, torch.Tensor]) -> tuple:
    """The inverse of `named_tensors`; a field without tensors was an empty tuple."""
    fields = dict.fromkeys(kind._fields, ())
    for name in sorted(tensors):
        field, _, index = name.partition(".")
        fields[field] = (*fields[field], tensors[name]) if index else tensors[name]
    return kind(**fields)
