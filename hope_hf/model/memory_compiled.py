"""The scan of a layer's memories as one operator of a compiled graph (`opaque`), from tokens to tokens.

Slots, chunks and their number depend on the text, and are made while the graph runs.

Axes: B sequence in batch, T token of the call, b sequences times heads, D head width.
"""

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from types import SimpleNamespace

import torch

from .chunks import SlotPlan, TokenPlan, plan_again, plan_chunks
from .memory_scan import Memories, ScanInputs, ScanState, fast_scan, fresh_state, scan_plain
from .opaque import call, register

# what the operator reads of a configuration
_FIELDS = ("memory_rule", "memory_chunk_size", "conv_kernel_size", "num_memory_heads", "memory_projections")


def scan_options_json(config, rate_factors: tuple[float, ...]) -> str:
    """What the operator has to know of a layer, as text; `rate_factors` as in `Memories.of`."""
    options = {name: getattr(config, name) for name in _FIELDS}
    options["rate_factors"] = rate_factors
    return json.dumps(options)


@lru_cache
def _read_options(text: str) -> SimpleNamespace:
    return SimpleNamespace(**json.loads(text))


def _numbered(name: str, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a tuple by name and index."""
    return {f"{name}{index}": tensor for index, tensor in enumerate(tensors)}


def _of_name(name: str, tensors: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The tuple that `_numbered` took apart; it has one or two tensors."""
    return tuple(tensor for key, tensor in tensors.items() if key.rstrip("01") == name)


def scan_tokens(
    inputs: ScanInputs,
    memories: Memories,
    state: ScanState | None,
    plan: TokenPlan,
    *,
    recompute: int,
    need_state: bool,
    is_plain: bool,
    options: str,
) -> tuple[torch.Tensor, ScanState | None]:
    """`memory_scan.scan_plain` for inputs [b, T, ...] in the order of the tokens; reads [b, T, D].

    Args:
        is_plain: whether `scan_plain` computes them.
        options: the result of `scan_options_json`.
    """
    initial = memories.initial if isinstance(memories.initial, tuple) else (memories.initial,)
    tensors = inputs._asdict()
    tensors["conv_weights"] = memories.conv_weights
    tensors |= _numbered("initial", initial)
    tensors["value_share"] = getattr(memories, "value_share", None)
    if state is not None:
        tensors["conv_tail"] = state.conv_tail
        tensors |= _numbered("current", state.current)
        tensors |= _numbered("chunk_start", state.chunk_start)
    tensors |= plan.tensors()
    sizes = [plan.columns(), recompute, int(need_state), int(is_plain)]
    reads, *after = call("memory_scan", tensors, sizes, options)
    if not need_state:
        return reads, None
    *weights, tail = after
    current, chunk_start = weights[: len(initial)], weights[len(initial) :]
    return reads, ScanState(tuple(current), tuple(chunk_start), tail)


def _parts(
    rules: dict[str, type[Memories]], tensors: dict[str, torch.Tensor], options: SimpleNamespace
) -> tuple[ScanInputs, Memories, ScanState | None]:
    """Inputs, memories, and the state or `None`, of the operator's tensors."""
    memories = rules[options.memory_rule].of(
        tensors["conv_weights"],
        tuple(options.memory_projections),
        _of_name("initial", tensors),
        tensors.get("value_share"),
        tuple(options.rate_factors),
    )
    inputs = ScanInputs(*(tensors.get(name) for name in ScanInputs._fields))
    state = None
    if "conv_tail" in tensors:
        current, chunk_start = _of_name("current", tensors), _of_name("chunk_start", tensors)
        state = ScanState(current, chunk_start, tensors["conv_tail"])
    return inputs, memories, state


def _flat(reads: torch.Tensor, state: ScanState | None) -> list[torch.Tensor]:
    if state is None:
        return [reads]
    return [reads, *state.current, *state.chunk_start, state.conv_tail]


def _by_head(plan: SlotPlan, heads: int) -> SlotPlan:
    """The slots of a plan for inputs [b, T, ...], whose rows are repeated for every head."""
    return SlotPlan(
        past=None,
        before=0,
        valid=plan.valid.repeat_interleave(heads, dim=0),
        token_of_slot=plan.token_of_slot.repeat_interleave(heads, dim=0),
        slot_of_token=plan.slot_of_token.repeat_interleave(heads, dim=0),
    )


def _in_slots(inputs: ScanInputs, slots: SlotPlan) -> ScanInputs:
    """Inputs [b, S, ...] of inputs in the order of the tokens; padding neither writes nor decays."""
    moved = {}
    for name, part in inputs._asdict().items():
        if part is not None:
            part = slots.to_slots(part)
            if part.ndim == 2:
                part = torch.where(slots.valid, part, 0.0)
        moved[name] = part
    return ScanInputs(**moved)


def _run(
    rules: dict[str, type[Memories]], tensors: dict[str, torch.Tensor], sizes: Sequence[int], text: str
) -> list[torch.Tensor]:
    columns, recompute, need_state, is_plain = sizes
    options = _read_options(text)
    inputs, memories, state = _parts(rules, tensors, options)
    rows, length, _ = inputs.query.shape
    heads = options.num_memory_heads
    shape = rows // heads, length
    plan = plan_again(partial(plan_chunks, options), tensors, shape, columns, has_past=state is not None)
    if plan.valid is not None:
        slots = _by_head(plan, heads)
        inputs = _in_slots(inputs, slots)
    fast = None if is_plain else fast_scan(options.memory_rule)
    scan = fast or scan_plain
    if state is None:
        state = fresh_state(memories)
    reads, after = scan(inputs, memories, state, plan.spans, bool(need_state), recompute)
    if plan.valid is not None:
        reads = slots.to_tokens(reads)
    reads, *state_after = _flat(reads, after)
    # a state may hold one tensor twice, or one of the state before
    return [reads, *(part.clone() for part in state_after)]


def _shapes(
    rules: dict[str, type[Memories]], tensors: dict[str, torch.Tensor], sizes: Sequence[int], text: str
) -> list[torch.Tensor]:
    _, _, need_state, _ = sizes
    inputs, memories, _ = _parts(rules, tensors, _read_options(text))
    reads = inputs.query.new_empty(inputs.query.shape)
    return _flat(reads, fresh_state(memories) if need_state else None)


def register_scan(rules: dict[str, type[Memories]]) -> None:
    """Register the operator for these rules."""
    register("memory_scan", partial(_run, rules), partial(_shapes, rules))
