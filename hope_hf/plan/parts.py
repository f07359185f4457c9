"""The blocks and ends of a step's batch: traced, or estimated where a model does not run on fake tensors."""

from collections import Counter
from dataclasses import dataclass, replace

from hope_hf.common.models import is_hope
from hope_hf.common.recompute_flag import parse_recomputed

from .estimate import estimated_blocks, estimated_ends
from .fake import kinds_of_layers, runs_on_kernels
from .launch import Launch, StepOptions
from .shapes import Shapes
from .trace import Block, Ends, Mode, Tracer


@dataclass(frozen=True)
class Parts:
    """What a process computes in the forward and backward pass of one batch.

    Attributes:
        blocks: from the first to the last.
        shared: bytes of what they keep of tensors that all blocks of a kind read.
        is_estimate: whether nothing was traced.
    """

    blocks: list[Block]
    ends: Ends
    shared: int
    is_estimate: bool

    @property
    def kept(self) -> int:
        """What all blocks keep for the backward pass."""
        return sum(block.kept for block in self.blocks)


def mode_of(launch: Launch) -> Mode:
    """How a model computes under a launch."""
    strategy = launch.strategy
    is_cast = strategy.is_fsdp and strategy.gathers or strategy.engine == "deepspeed" and launch.precision == "fp16"
    return Mode(launch.precision, is_cast and launch.precision != "no", launch.on_cpu)


def parts_of(config, shapes: Shapes, launch: Launch, step: StepOptions) -> Parts:
    """The parts of a step's batch under a launch; what is traced is kept in `shapes`."""
    mode = mode_of(launch)
    try:
        if mode not in shapes.untraceable:
            _require_like_layers(config, shapes)
            return _traced(config, shapes, launch, step)
    except Exception:
        if is_hope(config):
            raise
        # Operators of other architectures may read numbers, which fake tensors lack.
        shapes.untraceable.add(mode)
    return estimated_parts(config, shapes, launch, step)


def _traced(config, shapes: Shapes, launch: Launch, step: StepOptions) -> Parts:
    mode = mode_of(launch)
    recomputed = parse_recomputed(step.checkpointing)
    tracer = _tracer(config, shapes, step, mode, recomputed.part)
    traced: dict[tuple[str, bool], Block] = {}
    shared: Counter[str] = Counter()
    blocks = []
    for index, kind in enumerate(kinds_of_layers(config)):
        is_recomputed = recomputed.part == "block" and index % recomputed.every == 0
        key = kind, is_recomputed
        if key not in traced:
            block = tracer.block(kind, is_recomputed, step.batch_size, step.block_size)
            if is_hope(config) and runs_on_kernels(config.mixers[index], config, launch):
                keeps_mixer = recomputed.part != "mixer" and not is_recomputed
                block = _less(block, _saved_by_kernels(config, shapes, step, mode, index), keeps_mixer)
            traced[key] = block
            shared[kind] = max(shared[kind], block.shared)
        blocks.append(traced[key])
    # Under FSDP both gradients of a tied embedding exist at once.
    in_place = not (launch.strategy.is_fsdp and launch.strategy.gathers)
    ends = tracer.ends(step.batch_size, step.block_size, in_place)
    # The ends keep the token ids, 8 bytes each, and what they need themselves, such as the mask of a dropout.
    of_ends = ends.kept - 8 * step.batch_size * step.block_size
    of_blocks = sum(max(0, size - of_ends) for size in shared.values())
    return Parts(blocks, ends, of_blocks, is_estimate=False)


def _tracer(config, shapes: Shapes, step: StepOptions, mode: Mode, part: str) -> Tracer:
    key = mode, part
    if key not in shapes.tracers:
        shapes.tracers[key] = Tracer(config, step, mode, part)
    return shapes.tracers[key]


def _saved_by_kernels(config, shapes: Shapes, step: StepOptions, mode: Mode, index: int) -> int:
    """Bytes that a layer's mixer keeps on torch's operators, which are traced, and not on kernels of GPUs."""
    kind = kinds_of_layers(config)[index]
    batch = step.batch_size, step.block_size
    whole = _tracer(config, shapes, step, mode, "none").block(kind, False, *batch)
    without_mixer = _tracer(config, shapes, step, mode, "mixer").block(kind, False, *batch)
    low = 4 if mode.precision == "no" else 2
    is_autocast = mode.precision != "no" and not mode.is_cast
    kept = config.mixers[index].kept_by_kernels(config, *batch, low, is_autocast)
    return whole.kept - without_mixer.kept - kept


def _less(block: Block, size: int, keeps_mixer: bool) -> Block:
    """A block whose mixer takes `size` bytes less; `keeps_mixer`: whether it is not recomputed."""
    kept = size if keeps_mixer else 0
    return replace(
        block,
        forward=block.forward - size,
        inside=block.inside - kept,
        kept=block.kept - kept,
        backward=tuple(max(block.end, peak - size) for peak in block.backward),
    )


def estimated_parts(config, shapes: Shapes, launch: Launch, step: StepOptions) -> Parts:
    """The parts by the shapes of the weights alone, which takes no time."""
    mode = mode_of(launch)
    recomputed = parse_recomputed(step.checkpointing)
    tokens = step.batch_size * step.block_size
    width = config.hidden_size
    blocks = estimated_blocks(shapes, mode, width, tokens, recomputed)
    ends = estimated_ends(shapes, mode, width, config.vocab_size, tokens)
    return Parts(blocks, ends, shared=0, is_estimate=True)


def _require_like_layers(config, shapes: Shapes) -> None:
    """ValueError unless layers of a kind have as many parameters."""
    kinds = kinds_of_layers(config)
    sizes = {(kind, shapes.units[index]) for index, kind in enumerate(kinds)}
    if len(sizes) > len(set(kinds)):
        raise ValueError(f"layers of a {config.model_type} differ")
