"""Kernels of flash-linear-attention, the extra `hope_hf[gpu]`: the delta rule's scan, and selected blocks of keys.

Delta rule (arXiv 2412.06464): without memories that project keys or values, the deviation S of the content memory is
the state of a gated DeltaNet whose targets are the values minus the reads of the initial weights:

    S_t = alpha_t S_{t-1} + eta_t k_t^T (v_t - k_t W_0 - k_t alpha_t S_{t-1}),     read: q_t S_t + q_t W_0 + d v_t

Convolution and norms take all chunks at once. A document within a row is a sequence of its own.

Sparse attention: `parallel_nsa` runs a program per query, which reads given blocks. `sparse_fast` selects the blocks
with learned compressed keys (flash-linear-attention's are means of blocks), and computes the two other branches.

Axes of the scan as in `memory_scan`, of sparse attention as in `sparse_fast`.
"""

import importlib.metadata
import importlib.util
import os

import torch
import torch.nn.functional as F
from torch.torch_version import TorchVersion

from .backends import VARIABLE
from .chunks import ChunkSpan, merge_spans
from .memory_delta import DeltaMemories
from .memory_scan import ScanInputs, ScanState, make_qkv, unit, written_values
from .sparse_branches import SparseSizes

# largest head width that fits the chip
_WIDEST = 256
# rows and columns of the smallest matrix product of `parallel_nsa`
_LEAST = 16


def _obstacle(query: torch.Tensor) -> str | None:
    """Why no kernel can read at queries [..., D]; `None` if one can."""
    if query.dtype == torch.float64:
        return "the model is float64"
    if query.shape[-1] > _WIDEST:
        return f"heads are wider than {_WIDEST}"
    if query.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the model is on a CPU"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'hope_hf[gpu]')"
    return None


def scan_obstacle(inputs: ScanInputs, memories) -> str | None:
    """Why the kernels cannot compute this scan; `None` if they can."""
    query = inputs.query
    if not isinstance(memories, DeltaMemories):
        return "flash-linear-attention has no kernels for memory_rule='paper'"
    if memories.projected:
        return "flash-linear-attention has no kernels for memory_projections"
    return _obstacle(query) or (_defect(query.device) if torch.is_grad_enabled() else None)


def _defect(device: torch.device) -> str | None:
    """Why flash-linear-attention refuses its backward pass (its issue 640); `None` if it does not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    found = TorchVersion(importlib.metadata.version("triton"))
    is_wrong = "3.4.0" <= found < "3.7.1"
    if not is_wrong or importlib.util.find_spec("tilelang") is not None:
        return None
    return "Triton 3.4 to 3.7.0 compiles wrong gradients for Hopper GPUs (install triton>=3.7.1 or tilelang)"


def scan_fla(
    inputs: ScanInputs,
    memories: DeltaMemories,
    state: ScanState,
    spans: list[ChunkSpan],
    need_state: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, ScanState | None]:
    """`memory_scan.scan_plain` of a content memory alone; the kernels' operands are rounded to `dtype`."""
    span = merge_spans(spans)
    keys, values, queries, tail = make_qkv(inputs, memories, state, span)
    values = written_values(inputs, values, span)
    qkv = unit(queries), unit(keys), values
    reads, after = read_content(*qkv, inputs, memories, *state.current, spans, need_state, dtype)
    return reads, ScanState((after,), (), tail) if need_state else None


def read_content(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    inputs: ScanInputs,
    memories: DeltaMemories,
    current: torch.Tensor,
    spans: list[ChunkSpan],
    need_state: bool,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Reads of the content memory [b, S, D], and its deviation [b, D, D] after the last token if it is needed.

    Args:
        queries, keys: normalised [b, S, D].
        values: values to write [b, S, D].
        inputs: input of the scan, for its gates.
        current: deviation before the first token [b, D, D].
        dtype: dtype to which the kernels' operands are rounded.
    """
    operands = [part.to(dtype) for part in (queries, keys, values - keys @ memories.initial)]
    gates, bounds = [inputs.log_retention, inputs.rate], None
    if spans[0].keeps is not None:
        # the kernels take sequences of unequal lengths one after the other, as one row
        slots = spans[-1].stop
        begins = torch.cat([part.keeps for part in spans], dim=1).squeeze(-1).logical_not()
        first = begins[:, 0].clone()
        begins[:, 0] = True
        row, index = begins.nonzero(as_tuple=True)
        starts = torch.tensor([part.start for part in spans], device=row.device)
        bounds = F.pad(row * slots + starts[index], (0, 1), value=len(begins) * slots)
        # a row's first sequence continues from the row's state, unless it begins a document
        continues = (index == 0) & ~first[row]
        current = torch.where(continues[:, None, None], current[row], 0.0)
        operands = [part.flatten(0, 1).unsqueeze(0) for part in operands]
        gates = [part.flatten(0, 1).unsqueeze(0) for part in gates]
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError as error:
        raise ImportError(f"flash-linear-attention does not load ({error}): set {VARIABLE}=torch") from error
    one_token = spans[-1].stop == 1 and not torch.is_grad_enabled()
    run = fused_recurrent_gated_delta_rule if one_token else chunk_gated_delta_rule
    # axes [rows, tokens, heads, ...] with a head in every row
    reads, after = run(
        *(part.unsqueeze(2).contiguous() for part in operands),
        **{name: part.unsqueeze(2).contiguous() for name, part in zip(("g", "beta"), gates, strict=True)},
        scale=1.0,
        initial_state=current.unsqueeze(1),
        output_final_state=need_state,
        cu_seqlens=bounds,
    )
    reads = reads.reshape(queries.shape).to(queries.dtype) + memories.initial_read(queries, values)
    if not need_state:
        return reads, None
    if bounds is not None:
        # the state of each row's last sequence
        after = after[torch.bincount(row, minlength=len(begins)).cumsum(0) - 1]
    return reads, after.squeeze(1)


def selection_obstacle(queries: torch.Tensor, base: int, sizes: SparseSizes) -> str | None:
    """Why the kernels cannot read the selected blocks of queries [B, H, G, S, D]; `None` if they can."""
    if sizes.block < _LEAST or sizes.block != _power_of_two(sizes.block):
        return f"flash-linear-attention has no kernels for sparse_block_size={sizes.block} (16, 32, 64, ...)"
    if base and torch.is_grad_enabled():
        return "flash-linear-attention has no gradients of the keys of earlier calls"
    return _obstacle(queries)


def read_selected_fla(
    queries, keys, values, gates, chosen, base: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """`sparse_fast.read_selected`; the kernels' operands are rounded to `dtype`."""
    try:
        from fla.ops.nsa.parallel import parallel_nsa
    except ImportError as error:
        raise ImportError(f"flash-linear-attention does not load ({error}): set {VARIABLE}=torch") from error
    heads, length, group = queries.shape[1:4]
    # the query heads of a key head are the rows of a matrix product: zeros pad them to its smallest size
    rows = F.pad(queries, (0, 0, 0, _power_of_two(max(group, _LEAST)) - group))
    # keys up to the last query
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
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
