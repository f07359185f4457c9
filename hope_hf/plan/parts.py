"""The blocks and ends of a step's batch: traced, or estimated where a model does not run on fake tensors."""

import math
from collections import Counter
from dataclasses import dataclass, replace

from hope_hf.common.models import is_hope
from hope_hf.common.recompute_flag import parse_recomputed

from .allocations import Block, Ends
from .batches import Batches
from .estimate import estimated_blocks, estimated_ends
from .fake import kinds_of_layers, runs_on_kernels
from .launch import Launch, StepOptions
from .shapes import Shapes
from .tracer import Layer

BYTES_OF_TOKEN_ID = 8


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

    @property
    def backward(self) -> list[tuple[int, Block]]:
        """The blocks and their numbers in the order of the backward pass."""
        return list(enumerate(self.blocks))[::-1]


def parts_of(config, shapes: Shapes, launch: Launch, step: StepOptions) -> Parts:
    """The parts of a step's batch under a launch; what is traced is kept in `shapes`."""
    mode = launch.mode
    if mode in shapes.untraceable:
        return estimated_parts(config, shapes, launch, step)
    try:
        _require_like_layers(config, shapes)
        return _TracedStep(config, shapes, launch, step).parts()
    except Exception:
        if is_hope(config):
            raise
        # Operators of other architectures may read numbers, which fake tensors lack.
        shapes.untraceable.add(mode)
        return estimated_parts(config, shapes, launch, step)


class _TracedStep:
    """Traces the parts of a step's batch."""

    def __init__(self, config, shapes: Shapes, launch: Launch, step: StepOptions):
        self.config = config
        self.shapes = shapes
        self.launch = launch
        self.step = step
        self.recomputed = parse_recomputed(step.checkpointing)
        self.batch = step.batch_size, step.block_size

    def parts(self) -> Parts:
        recomputed = self.recomputed
        by_layer: dict[Layer, Block] = {}
        blocks = []
        for index, kind in enumerate(kinds_of_layers(self.config)):
            is_recomputed = recomputed.part == "block" and index % recomputed.every == 0
            layer = Layer(kind, is_recomputed)
            if layer not in by_layer:
                by_layer[layer] = self._block(index, layer)
            blocks.append(by_layer[layer])
        ends = self._ends()
        return Parts(blocks, ends, self._shared(by_layer, ends), is_estimate=False)

    def _block(self, index: int, layer: Layer) -> Block:
        """The block of a layer."""
        part = self.recomputed.part
        block = self._traced(layer, part)
        if not is_hope(self.config):
            return block
        mixer = self.config.mixers[index]
        if not runs_on_kernels(mixer, self.config, self.launch):
            return block
        keeps_mixer = part != "mixer" and not layer.is_recomputed
        return _less(block, self._saved_by_kernels(layer.kind, mixer), keeps_mixer)

    def _traced(self, layer: Layer, part: str) -> Block:
        """The block of a layer on torch's operators; `part`: what is recomputed."""
        return self._batches(part).block(layer, *self.batch)

    def _batches(self, part: str) -> Batches:
        traced = self.shapes.traced
        mode = self.launch.mode
        key = mode, part
        if key not in traced:
            traced[key] = Batches(self.config, self.step, mode, part)
        return traced[key]

    def _ends(self) -> Ends:
        # Under FSDP both gradients of a tied embedding exist at once.
        strategy = self.launch.strategy
        in_place = not (strategy.is_fsdp and strategy.gathers)
        batches = self._batches(self.recomputed.part)
        return batches.ends(*self.batch, in_place)

    def _shared(self, by_layer: dict[Layer, Block], ends: Ends) -> int:
        """What the blocks of all kinds keep of tensors that the ends do not keep for themselves."""
        shared: Counter[str] = Counter()
        for layer, block in by_layer.items():
            before = shared[layer.kind]
            shared[layer.kind] = max(before, block.shared)
        # Beside the token ids the ends keep what they need themselves, such as the mask of a dropout.
        of_ends = ends.kept - BYTES_OF_TOKEN_ID * math.prod(self.batch)
        others = [max(0, size - of_ends) for size in shared.values()]
        return sum(others)

    def _saved_by_kernels(self, kind: str, mixer) -> int:
        """Bytes that a layer's mixer keeps on torch's operators, which are traced, and not on kernels of GPUs."""
        mode = self.launch.mode
        layer = Layer(kind)
        whole = self._traced(layer, "none")
        without_mixer = self._traced(layer, "mixer")
        is_autocast = mode.precision != "no" and not mode.is_cast
        by_kernels = mixer.kept_by_kernels(self.config, *self.batch, mode.low_bytes, is_autocast)
        return whole.kept - without_mixer.kept - by_kernels


def _less(block: Block, size: int, keeps_mixer: bool) -> Block:
    """A block whose mixer takes `size` bytes less; `keeps_mixer`: whether it is not recomputed."""
    kept = size if keeps_mixer else 0
    backward = [max(block.end, peak - size) for peak in block.backward]
    return replace(
        block,
        forward=block.forward - size,
        inside=block.inside - kept,
        kept=block.kept - kept,
        backward=tuple(backward),
    )


def estimated_parts(config, shapes: Shapes, launch: Launch, step: StepOptions) -> Parts:
    """The parts by the shapes of the weights alone, which takes no time."""
    recomputed = parse_recomputed(step.checkpointing)
    tokens = step.batch_size * step.block_size
    width = config.hidden_size
    blocks = estimated_blocks(shapes, launch.mode, width, tokens, recomputed)
    ends = estimated_ends(shapes, launch.mode, width, config.vocab_size, tokens)
    return Parts(blocks, ends, shared=0, is_estimate=True)


def _require_like_layers(config, shapes: Shapes) -> None:
    """ValueError unless layers of a kind have as many parameters."""
    sizes: dict[str, int] = {}
    for index, kind in enumerate(kinds_of_layers(config)):
        size = shapes.units[index]
        if sizes.setdefault(kind, size) != size:
            raise ValueError(f"layers of a {config.model_type} differ")
