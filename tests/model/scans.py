"""Random scans of all kinds of rows, for tests that compare one way to compute them with another (float64)."""

import torch

from hope_hf import HopeConfig
from hope_hf.model.chunks import Past, plan_chunks
from hope_hf.model.memory_delta import DeltaMemories
from hope_hf.model.memory_scan import ScanInputs, ScanState, fresh_state, scan_plain

WIDTH, TAPS, HEADS = 8, 4, 2


def normal(*shape, scale=1.0):
    return torch.randn(*shape, dtype=torch.float64) * scale


def plan(chunk, rows, length, **options):
    config = HopeConfig(
        vocab_size=8, hidden_size=16, num_hidden_layers=1, head_dim=WIDTH, num_memory_heads=HEADS,
        conv_kernel_size=TAPS, memory_chunk_size=chunk,
    )  # fmt: skip
    return plan_chunks(config, (rows, length), torch.device("cpu"), **options)


def plain_pieces(chunk, seen=0):
    """Rows that have all read `seen` tokens; the last chunk is not filled."""
    past = Past(seen, True, torch.full((3,), seen), torch.zeros(3, dtype=torch.long)) if seen else None
    return plan(chunk, 3, 2 * chunk + 5, past=past).spans


def ragged_pieces(chunk, last=2):
    """Rows of unequal history, with padding on both sides and inside, and with documents of many lengths.

    The last document has `last` tokens.
    """
    length = 2 * chunk + 7
    mask = torch.ones(3, length, dtype=torch.long)
    mask[0, :3], mask[1, -4:], mask[2, [0, 1, chunk, chunk + 1]] = 0, 0, 0
    positions = torch.arange(length).repeat(3, 1) + 100
    for row, begin in ((0, 5), (0, chunk + 2), (1, 1), (2, length - last)):
        positions[row, begin:] = torch.arange(length - begin)
    past = Past(9, False, torch.tensor([3, 9, 1]), torch.zeros(3, dtype=torch.long))
    return plan(chunk, 3, length, past=past, padding_mask=mask, position_ids=positions).spans


def problem(spans, made="kv", factors=None, forgetting=0.3, fresh=False, width=WIDTH, rows=3 * HEADS, erases=True):
    """Random inputs, memories and state of a scan; all tensors are leaves that want a gradient."""
    torch.manual_seed(0)
    slots = spans[-1].stop
    factors = (0.1,) * len(made) + (1.0,) if factors is None else factors
    streams = [normal(rows, slots, width) for _ in range(3)]
    gates = torch.rand(3, rows, slots, dtype=torch.float64)
    # of the four kinds of projections, two have values of the norm that their stream gives
    value_norm = 2 * gates[2] if len(made) % 2 else None
    erased = None if erases else torch.rand(rows, slots, dtype=torch.float64)
    inputs = ScanInputs(*streams, gates[0].clone(), -forgetting * gates[1], value_norm, erased)
    initial = normal(rows, width, width, scale=0.3)
    weights = normal(TAPS, rows, 1, 3 * width, scale=0.5), tuple(made), initial, normal(rows, 1, 1), factors
    memories = DeltaMemories(*weights)
    leaves = [part for part in (*inputs, memories.conv_weights, initial, memories.value_share) if part is not None]
    if fresh:
        state = fresh_state(memories)
    else:
        weights = [normal(rows, width, len(factors) * width, scale=0.3) for _ in range(2 if made else 1)]
        state = ScanState((weights[0],), tuple(weights[1:]), normal(rows, TAPS - 1, 3 * width))
        leaves += [*weights, state.conv_tail]
    return inputs, memories, state, spans, [leaf.requires_grad_() for leaf in leaves]


def in_float32(inputs, memories, state, spans, leaves, device="cpu"):
    """The same problem in float32, with leaves of its own."""
    narrow = {id(leaf): leaf.detach().float().to(device).requires_grad_() for leaf in leaves}

    def of(part):
        if isinstance(part, torch.Tensor):
            return narrow.get(id(part), part.to(device, part.dtype if part.dtype != torch.float64 else torch.float32))
        if isinstance(part, tuple):
            parts = [of(each) for each in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        return part

    return of(inputs), of(memories), of(state), [of(span) for span in spans], [narrow[id(leaf)] for leaf in leaves]


def largest_error(run, arguments, need_state=True, device="cpu", unread=True):
    """The largest error of what `run` returns in float32 against the plain scan in float64, over each tensor's norm.

    `unread`: whether the content memory at the chunk's start counts, which nothing reads.
    """
    expected = results(scan_plain, *arguments, need_state=need_state, unread=unread)
    found = results(run, *in_float32(*arguments, device=device), need_state=need_state, unread=unread)
    errors = [
        # what is below is nothing beside the others, and may be zero
        (ours.cpu() - theirs).norm() / theirs.norm().clamp(min=1e-9)
        for ours, theirs in zip(found, expected, strict=True)
    ]
    # a maximum of Python's would pass a NaN by
    return float(torch.stack(errors).amax())


def results(run, inputs, memories, state, spans, leaves, need_state=True, unread=True):
    """What a scan returns, and the gradients of all leaves for a random weighting of it."""
    reads, after = run(inputs, memories, state, spans, need_state)
    made = [reads]
    if need_state:
        starts = [part if unread else part[..., : -reads.shape[-1]] for part in after.chunk_start]
        made += [*after.current, *starts, after.conv_tail]
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in made]
    if not torch.is_grad_enabled():
        return made
    loss = sum((part * weight).sum() for part, weight in zip(made, weights, strict=True))
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    gradients = [torch.zeros_like(a) if b is None else b for a, b in zip(leaves, gradients, strict=True)]
    return [part.detach() for part in made] + gradients
