"""The scan of a layer's memories as one operator of a compiled graph (`opaque`), from tokens to tokens.

Slots, chunks and their number depend on the text, and are made while the graph runs.

Axes: B sequence in batch, T token of the call, b sequences times heads, D head width.
"""

import json
from collections.abc import Sequence
from functools import lru_cache, partial
from types import SimpleNamespace

import torch

from .backends import FAST
from .chunks import SlotPlan, TokenPlan, plan_again, plan_chunks
from .memory_scan import Memories, ScanInputs, ScanState, fresh_state, scan_plain
from .opaque import call, register

# what the operator reads of a configuration
_FIELDS = ("memory_rule", "memory_chunk_size", "conv_kernel_size", "num_memory_heads", "memory_projections")


def described(config, rate_factors: tuple[float, ...]) -> str:
    """What the operator has to know of a layer, as text; `rate_factors` as in `Memories.of`."""
    return json.dumps({name: getattr(config, name) for name in _FIELDS} | {"rate_factors": rate_factors})


_described = lru_cache(lambda text: SimpleNamespace(**json.loads(text)))


def scan_tokens(
    inputs: ScanInputs,
    memories: Memories,
    state: ScanState | None,
    plan: TokenPlan,
    recompute: int,
    need_state: bool,
    is_plain: bool,
    about: str,
) -> tuple[torch.Tensor, ScanState | None]:
    """`memory_scan.scan_plain` for inputs [b, T, ...] in the order of the tokens; reads [b, T, D].

    Args:
        is_plain: whether `scan_plain` computes them.
        about: the result of `described`.
    """
    initial = memories.initial if isinstance(memories.initial, tuple) else (memories.initial,)
    tensors = inputs._asdict() | {"conv_weights": memories.conv_weights}
    tensors |= {f"initial{index}": weight for index, weight in enumerate(initial)}
    tensors["value_share"] = getattr(memories, "value_share", None)
    if state is not None:
        tensors["conv_tail"] = state.conv_tail
        for name in ("current", "chunk_start"):
            tensors |= {f"{name}{index}": weight for index, weight in enumerate(getattr(state, name))}
    sizes = [plan.columns(), recompute, int(need_state), int(is_plain)]
    reads, *after = call("memory_scan", tensors | plan.tensors(), sizes, about)
    if not need_state:
        return reads, None
    *weights, tail = after
    return reads, ScanState(tuple(weights[: len(initial)]), tuple(weights[len(initial) :]), tail)


def _parts(rules: dict, tensors: dict[str, torch.Tensor], about: str):
    """Inputs, memories, and the state or `None`, of the operator's tensors."""
    config = _described(about)

    def numbered(name: str) -> tuple[torch.Tensor, ...]:
        return tuple(tensor for key, tensor in tensors.items() if key.rstrip("01") == name)

    made = tensors["conv_weights"], tuple(config.memory_projections), numbered("initial"), tensors.get("value_share")
    memories = rules[config.memory_rule].of(*made, tuple(config.rate_factors))
    inputs = ScanInputs(*(tensors.get(name) for name in ScanInputs._fields))
    state = None
    if "conv_tail" in tensors:
        state = ScanState(numbered("current"), numbered("chunk_start"), tensors["conv_tail"])
    return inputs, memories, state


def _flat(reads: torch.Tensor, state: ScanState | None) -> list[torch.Tensor]:
    return [reads, *(() if state is None else (*state.current, *state.chunk_start, state.conv_tail))]


def _run(rules: dict, tensors: dict[str, torch.Tensor], sizes: Sequence[int], about: str) -> list[torch.Tensor]:
    columns, recompute, need_state, is_plain = sizes
    inputs, memories, state = _parts(rules, tensors, about)
    config, (rows, length, _) = _described(about), inputs.query.shape
    heads = config.num_memory_heads
    plan = plan_again(partial(plan_chunks, config), tensors, (rows // heads, length), columns, state is not None)
    if plan.valid is not None:
        layout = {name: getattr(plan, name) for name in ("valid", "token_of_slot", "slot_of_token")}
        layout = {name: part.repeat_interleave(heads, dim=0) for name, part in layout.items()}
        by_head = SlotPlan(None, 0, **layout)
        # padding neither writes nor decays
        inputs = [None if part is None else by_head.to_slots(part) for part in inputs]
        inputs[3:] = [None if gate is None else torch.where(by_head.valid, gate, 0.0) for gate in inputs[3:]]
        inputs = ScanInputs(*inputs)
    fast = None if is_plain else FAST.get(f"scan_{config.memory_rule}")
    run = fast or scan_plain
    state = fresh_state(memories) if state is None else state
    reads, after = run(inputs, memories, state, plan.spans, bool(need_state), recompute)
    reads = reads if plan.valid is None else by_head.to_tokens(reads)
    reads, *state = _flat(reads, after)
    # a state may hold one tensor twice, or one of the state before
    return [reads, *(part.clone() for part in state)]


def _shapes(rules: dict, tensors: dict[str, torch.Tensor], sizes: Sequence[int], about: str) -> list[torch.Tensor]:
    inputs, memories, _ = _parts(rules, tensors, about)
    return _flat(inputs.query.new_empty(inputs.query.shape), fresh_state(memories) if sizes[2] else None)


def register_scan(rules: dict[str, type[Memories]]) -> None:
    """Register the operator for these rules."""
    register("memory_scan", partial(_run, rules), partial(_shapes, rules))
