"""Kernels of flash-linear-attention, the extra `hope_hf[gpu]`: the mixer of memories, and selected blocks of keys.

Delta rule (arXiv 2412.06464): without memories that project keys or values, the deviation S of the content memory is
the state of a gated DeltaNet whose targets are the values minus the reads of the initial weights:

    S_t = alpha_t S_{t-1} + eta_t k_t^T (v_t - k_t W_0 - k_t alpha_t S_{t-1}),     read: q_t S_t + q_t W_0 + d v_t

`mix` computes the whole mixer. It reads and writes few bytes around the scan: streams stay [B, T, H, D], heads beside
each other as the linear maps make them, in the maps' dtype. Gates, states and what the kernels add up are float32.

Sparse attention: `parallel_nsa` runs a program per query, which reads given blocks. `hope_hf.fast` selects the blocks
with learned compressed keys (flash-linear-attention's are means of blocks), and computes the two other branches.

Axes of the scan as in `memory_scan`, of sparse attention as in `sparse_branches`.
"""

import importlib.metadata
import importlib.util
import os
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.torch_version import TorchVersion
from transformers.configuration_utils import PreTrainedConfig

from .backends import VARIABLE, asked_kernels
from .chunks import ChunkPlan, Sequences
from .memory_delta import DeltaMemories
from .memory_scan import NORM_EPSILON, ScanState
from .sparse_branches import SparseSizes

# largest head width that fits the chip
_WIDEST = 256
# rows and columns of the smallest matrix product of `parallel_nsa`
_LEAST = 16


def _obstacle(x: Tensor, width: int) -> str | None:
    """Why no kernel can compute heads of that width of dtype and device of `x`; `None` if one can."""
    if x.dtype == torch.float64:
        return "the model is float64"
    if width > _WIDEST:
        return f"heads are wider than {_WIDEST}"
    if x.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "the model is on a CPU"
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed (pip install 'hope_hf[gpu]')"
    return None


def scan_obstacle(rule: type, projected: tuple[str, ...], hidden_states: Tensor, width: int) -> str | None:
    """Why the kernels cannot compute the scan of heads of that width; `None` if they can.

    Args:
        rule: class of the memories (`Memories`).
        projected: those of "k" and "v" that memories project.
        hidden_states: the mixer's input.
    """
    if rule is not DeltaMemories:
        return "flash-linear-attention has no kernels for memory_rule='paper'"
    if projected:
        return "flash-linear-attention has no kernels for memory_projections"
    obstacle = _obstacle(hidden_states, width)
    if obstacle is None and torch.is_grad_enabled():
        # asked last, since it reads the version of a package that may be missing
        obstacle = _defect(hidden_states.device)
    return obstacle


@cache
def _defect(device: torch.device) -> str | None:
    """Why flash-linear-attention refuses its backward pass (its issue 640); `None` if it does not."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    # read from files, which takes a millisecond: once per process, not in every layer
    triton = TorchVersion(importlib.metadata.version("triton"))
    if not "3.4.0" <= triton < "3.7.1" or importlib.util.find_spec("tilelang") is not None:
        return None
    return "Triton 3.4 to 3.7.0 compiles wrong gradients for Hopper GPUs (install triton>=3.7.1 or tilelang)"


def mix(
    mixer, hidden_states: Tensor, state: ScanState | None, plan: ChunkPlan, need_state: bool
) -> tuple[Tensor, ScanState | None]:
    """`SelfModifyingTitans.forward` without memories that project.

    The kernels take the documents of all rows one after the other, without padding (`chunks.Sequences`); rows that are
    one document each stay as they are.
    """
    heads = mixer.config.num_memory_heads
    shape = hidden_states.shape[:2]
    sequences = plan.sequences
    bounds = None
    x = hidden_states
    if sequences is not None:
        bounds = sequences.bounds
        x = sequences.gather(hidden_states)
    if not x.shape[1]:
        # padding alone
        return torch.zeros_like(hidden_states), state
    # linear maps and gates
    streams = [mixer.k_proj(x), mixer.v_proj(x), mixer.q_proj(x)]
    gate = mixer.g_proj(x).unflatten(-1, (heads, -1))
    gates = mixer.gates(x, plan.is_frozen)
    dtype = gate.dtype
    with torch.autocast(x.device.type, enabled=False):
        current, tails = _states_of_sequences(state, sequences)
        keys, values, queries, tails_after = _convolve_and_normalise(
            mixer, streams, tails, gates.value_norm, bounds=bounds, need_state=need_state
        )
        # writes and reads
        (initial,) = mixer.initial_memory(dtype)
        # before the scan, so that the backward pass adds to its gradients, which lie as the norms read them
        targets = values + _per_head(keys, -initial)
        reads_of_initial = _per_head(queries, initial)
        reads, current_after = _scan(
            queries,
            keys,
            targets,
            log_retention=gates.log_retention,
            rate=gates.rate,
            current=current,
            need_state=need_state,
            bounds=bounds,
            is_token=shape[1] == 1,
        )
        share = gates.own_share(mixer.value_share(dtype)).unsqueeze(-1)
        reads = torch.addcmul(reads + reads_of_initial, values, share)
        gated = mixer.o_norm(reads, partial(_gated_norm, gate=gate))
    output = mixer.o_proj(gated.flatten(2))
    if sequences is not None:
        output = sequences.scatter(output, shape)
    if not need_state:
        return output, None
    return output, _state_after(state, current_after, tails_after, sequences, heads)


def _state_after(
    state: ScanState | None,
    current: Tensor,
    tails: list[Tensor],
    sequences: Sequences | None,
    heads: int,
) -> ScanState:
    """The state of the rows after the call, from that before it and those of the n sequences.

    Args:
        state: before the call, `None` at a text's start.
        current: the content memory's deviation after each sequence [n, H, D, D].
        tails: of k, v and q [n, H D, K].
    """
    tails_by_head = []
    for tail in tails:
        # without the column that the convolution ignores, [n, H D, K] to [n, H, K - 1, D]
        by_head = tail[..., 1:].unflatten(1, (heads, -1))
        tails_by_head.append(by_head.mT)
    tail = torch.cat(tails_by_head, dim=-1).to(torch.float32)
    if sequences is not None:
        current_before = None if state is None else state.current[0]
        tail_before = None if state is None else state.conv_tail
        current = sequences.scatter_states(current, current_before)
        tail = sequences.scatter_states(tail, tail_before)
    return ScanState((current,), (), tail)


def _states_of_sequences(
    state: ScanState | None, sequences: Sequences | None
) -> tuple[Tensor | None, list[Tensor | None]]:
    """The content memory's deviation before each of n sequences [n, H, D, D], and the tails of k, v and q [n, H D, K].

    `None`s at a text's start.
    """
    if state is None:
        return None, [None, None, None]
    (current,) = state.current
    tail = state.conv_tail
    if sequences is not None:
        # the tail's oldest inputs may be those of the document before
        age = torch.arange(tail.shape[2], 0, -1, device=tail.device)
        current = sequences.gather_states(current)
        tail = sequences.gather_states(tail, min_age=age.unsqueeze(-1))
    # the convolution ignores the first column
    padded = F.pad(tail, (0, 0, 1, 0))
    tails = []
    for part in padded.chunk(3, dim=-1):
        # [n, H, K, D] to [n, H D, K]
        tails.append(part.mT.flatten(1, 2))
    return current, tails


def _convolve_and_normalise(
    mixer, streams: list[Tensor], tails: list, value_norm: Tensor | None, *, bounds, need_state: bool
) -> tuple[Tensor, Tensor, Tensor, list]:
    """Keys, values and queries [B, T, H, D] of the maps' outputs [B, T, H D], and the tails for the next call."""
    try:
        from fla.modules.causal_conv1d import causal_conv1d
        from fla.modules.norm.l2norm import l2norm
    except ImportError as error:
        raise _does_not_load(error) from error
    convolutions = (mixer.k_conv1d, mixer.v_conv1d, mixer.q_conv1d)
    heads = mixer.config.num_memory_heads
    convolved = []
    tails_after = []
    for stream, convolution, tail in zip(streams, convolutions, tails, strict=True):
        # [K, H, D] to [H D, K], as the weights lie in memory
        weights = convolution(torch.float32).permute(1, 2, 0).flatten(0, 1)
        active, tail_after = causal_conv1d(
            stream, weights, initial_state=tail, output_final_state=need_state, activation="silu", cu_seqlens=bounds
        )
        convolved.append(active.unflatten(-1, (heads, -1)))
        tails_after.append(tail_after)
    keys, values, queries = convolved
    keys = l2norm(keys, NORM_EPSILON)
    queries = l2norm(queries, NORM_EPSILON)
    if value_norm is not None:
        value_norm = value_norm.to(values.dtype).unsqueeze(-1)
        values = l2norm(values, NORM_EPSILON) * value_norm
    return keys, values, queries, tails_after


def _gated_norm(x: Tensor, weight: Tensor, epsilon: float, *, gate: Tensor) -> Tensor:
    """`layers.gated_norm` by a kernel."""
    try:
        from fla.modules.norm.fused_norm_gate import rms_norm_gated
    except ImportError as error:
        raise _does_not_load(error) from error
    return rms_norm_gated(x, gate, weight, None, eps=epsilon)


def is_expected(config: PreTrainedConfig) -> bool:
    """Whether a model that is planned on this machine will run on `mix`, by its GPU and by what `backends` names."""
    asked = asked_kernels()
    if config.memory_rule != "delta" or config.memory_projections:
        return False
    has_kernels = torch.cuda.is_available() and importlib.util.find_spec("fla") is not None
    return asked == "fla" or asked == "auto" and has_kernels


def kept_bytes(config: PreTrainedConfig, tokens: int, low: int) -> int:
    """Bytes that autograd keeps of `mix` besides the input; `low` bytes per output of a linear map.

    Per token and head ten streams, one more with the value gate, a row of the inverse of a chunk's 64 keys, and ten
    float32 numbers of gates and norms.
    """
    streams = 10 + config.memory_value_gate
    of_token_and_head = low * (streams * config.head_dim + 64) + 40
    return tokens * config.num_memory_heads * of_token_and_head


def _per_head(x: Tensor, weights: Tensor) -> Tensor:
    """`x` [B, T, H, D] times the weights of its head [H, D, D]."""
    by_head = x.flatten(0, 1).transpose(0, 1)
    return torch.bmm(by_head, weights).transpose(0, 1).view(x.shape)


def _scan(
    queries, keys, values, log_retention, rate, current, need_state: bool, bounds, is_token: bool
) -> tuple[Tensor, Tensor | None]:
    """Reads [B, T, H, D] of the gated delta rule, and its states [n, H, D, D] after n sequences if they are needed."""
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    except ImportError as error:
        raise _does_not_load(error) from error
    run = chunk_gated_delta_rule
    if is_token and not torch.is_grad_enabled():
        run = fused_recurrent_gated_delta_rule
    return run(
        queries,
        keys,
        values,
        g=log_retention,
        beta=rate,
        scale=1.0,
        initial_state=current,
        output_final_state=need_state,
        cu_seqlens=bounds,
    )


# Every import of fla stands in a `try` block: transformers wants all other packages that a file of the Hub imports.
def _does_not_load(error: ImportError) -> ImportError:
    return ImportError(f"flash-linear-attention does not load ({error}): set {VARIABLE}=torch")


def selection_obstacle(queries: Tensor, base: int, sizes: SparseSizes) -> str | None:
    """Why the kernels cannot read the selected blocks of queries [B, H, G, S, D]; `None` if they can."""
    if sizes.block < _LEAST or sizes.block != _power_of_two(sizes.block):
        return f"flash-linear-attention has no kernels for sparse_block_size={sizes.block} (16, 32, 64, ...)"
    if base and torch.is_grad_enabled():
        return "flash-linear-attention has no gradients of the keys of earlier calls"
    return _obstacle(queries, queries.shape[-1])


def read_selected_fla(
    queries, keys, values, gates, chosen, base: int, block: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """`fast.sparse_reads.read_selected`; the kernels' operands are rounded to `dtype`."""
    try:
        from fla.ops.nsa.parallel import parallel_nsa
    except ImportError as error:
        raise _does_not_load(error) from error
    heads, length, group = queries.shape[1:4]
    # the query heads of a key head are the rows of a matrix product: zeros pad them to its smallest size
    missing = _power_of_two(max(group, _LEAST)) - group
    rows = F.pad(queries, (0, 0, 0, missing))
    blocks = chosen.shape[-1]
    missing = _power_of_two(blocks) - blocks
    chosen = F.pad(chosen, (0, missing), value=-1)
    # keys and values up to the last query
    stop = base + length
    reads = parallel_nsa(
        rows.transpose(1, 2).flatten(2, 3).to(dtype),
        keys[:, :, :stop].transpose(1, 2).to(dtype),
        values[:, :, :stop].transpose(1, 2).to(dtype),
        block_indices=chosen.transpose(1, 2),
        block_counts=chosen.shape[-1],
        block_size=block,
        scale=1.0,
    )
    # without the rows of zeros
    by_head = reads.unflatten(2, (heads, -1))[:, :, :, :group]
    reads = by_head.transpose(1, 2)
    return reads.to(queries.dtype) * gates, queries, keys, values


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below `number`."""
    return 1 << (number - 1).bit_length()
