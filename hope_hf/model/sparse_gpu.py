"""The selected branch of sparse attention by flash-linear-attention's kernels, the extra `hope_hf[gpu]`.

`parallel_nsa` runs a program per query, which reads given blocks. `sparse_fast` selects the blocks with learned
compressed keys (flash-linear-attention's are means of blocks), and computes the two other branches.

Axes as in `sparse_fast`.
"""

import importlib.util
import os

import torch
import torch.nn.functional as F

from .backends import VARIABLE
from .sparse_branches import SparseSizes

# head width that fits the chip
_WIDEST = 256
# rows and columns of the kernels' smallest matrix product
_LEAST = 16


def obstacle(queries: torch.Tensor, base: int, sizes: SparseSizes) -> str | None:
    """Why the kernels cannot read the selected blocks of queries [B, H, G, S, D]; `None` if they can."""
    if queries.dtype == torch.float64:
        return "the model is float64"
    if queries.shape[-1] > _WIDEST:
        return f"heads are wider than {_WIDEST}"
    if sizes.block < _LEAST or sizes.block != _power_of_two(sizes.block):
        return f"flash-linear-attention has no kernels for sparse_block_size={sizes.block} (16, 32, 64, ...)"
    if base and torch.is_grad_enabled():
        return "flash-linear-attention has no gradients of the keys of earlier calls"
    if queries.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the model is on a CPU"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'hope_hf[gpu]')"
    return None


def read_selected_fla(
    queries, keys, values, gates, chosen, base: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """`sparse_fast.read_selected`; the kernels' operands are rounded to `dtype`."""
    try:
        from fla.ops.nsa.parallel import parallel_nsa
    except ImportError as error:
        raise ImportError(f"flash-linear-attention does not load ({error}): set {VARIABLE}=torch") from error
    heads, length, group = queries.shape[1:4]
    # the query heads of a key are the rows of a matrix product: zeros fill it up
    rows = F.pad(queries, (0, 0, 0, _power_of_two(max(group, _LEAST)) - group))
    # the last keys belong to the queries' tokens
    known = (part[:, :, : base + length].transpose(1, 2).to(dtype) for part in (keys, values))
    chosen = F.pad(chosen, (0, _power_of_two(chosen.shape[-1]) - chosen.shape[-1]), value=-1)
    reads = parallel_nsa(
        rows.transpose(1, 2).flatten(2, 3).to(dtype),
        *known,
        block_indices=chosen.transpose(1, 2),
        block_counts=chosen.shape[-1],
        block_size=block,
        scale=1.0,
    )
    reads = reads.unflatten(2, (heads, -1))[:, :, :, :group].transpose(1, 2)
    return reads.to(queries.dtype) * gates, queries, keys, values


def _power_of_two(number: int) -> int:
    """The smallest one that is not smaller."""
    return 1 << (number - 1).bit_length()
