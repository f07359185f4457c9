"""What a block of each kind and the ends of a model allocate in a training step, traced on fake tensors.

The ends are what stands before and after the blocks: embedding, last norm, head and loss. A model with one block of
each kind takes the forward and backward pass of a step with the trainer's own code, one block at a time while the
others pass their input on. A tracker counts the bytes of all tensors that live, and hooks tell it what is running.
`memory.py` adds the parts up to the step of a deep model under any launch.

A block's bytes are affine in the rows of a batch, so two batches give every other. A mixer that goes over its text in
rounds of operators takes long: instead of a long text many short ones are traced, whose chunks are recomputed in the
same proportion.
"""

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors
from torch.utils._python_dispatch import TorchDispatchMode

from hope_hf.common.objective import can_skip_logits, summed_loss
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import Recomputed

from .fake import (
    as_if_real,
    autocast,
    build,
    hidden_states_of,
    in_precision,
    kinds_of_layers,
    operators_of,
    parameters_of,
    with_layers,
    without_dropout,
)
from .launch import StepOptions
from .shapes import blocks_of

# Rounds by which the longer one of two short texts is longer (`layers.Mixer.rounds`).
MORE_ROUNDS = 4
# Tokens of a text that only shows what a block returns.
FEW_TOKENS = 16


@dataclass(frozen=True)
class Block:
    """Bytes that a block allocates, its own gradients left out unless they are named.

    Attributes:
        forward: the peak of its forward pass over what lived before.
        inside: what it leaves until the model's forward pass ends, without its output: activations, its input, copies
            of weights.
        kept: what it leaves for its backward pass, without its output.
        input: of these, its input.
        shared: what it keeps of tensors that were made in front of the blocks and that all may read, such as a mask;
            they have no rows of the batch.
        backward: the peaks of its backward pass over what lived before its forward pass, its input included; the
            first until one of its parameters has its gradient, and so on.
        end: what is left when the gradient of its input is there.
        gradients: bytes of the gradients that its parameters have at each of the peaks.
    """

    forward: int
    inside: int
    kept: int
    input: int
    shared: int
    backward: tuple[int, ...]
    end: int
    gradients: tuple[int, ...]


@dataclass(frozen=True)
class Ends:
    """Bytes that the ends allocate, their gradients left out unless they are named.

    Attributes:
        inside: what stands in front of the blocks while the model's forward pass runs.
        kept: what of it is left for the backward pass, without the first block's input.
        forward: the peak of the model's forward pass, without blocks.
        outside: the peak between it and the head's backward pass, which is the loss unless the head computes it.
        head: what is left when the gradient of the head's output is there.
        loss: the peaks of the backward pass from the head down to the gradient of the last block's output.
        end: what is left when this gradient is there.
        carried: what stays until the backward pass has left the blocks, such as the head's share in the gradient of a
            tied embedding.
        last: the peaks of the backward pass below the blocks.
        loss_gradients, last_gradients: bytes of the gradients that parameters have at each of the peaks.
    """

    inside: int
    kept: int
    forward: int
    outside: int
    head: int
    loss: tuple[int, ...]
    end: int
    carried: int
    last: tuple[int, ...]
    loss_gradients: tuple[int, ...]
    last_gradients: tuple[int, ...]


def combined(*terms: tuple[float, Block | Ends]) -> Block | Ends:
    """The sum of traces times their weights, field by field."""
    weights = [weight for weight, _ in terms]
    sums = {}
    for field in fields(terms[0][1]):
        values = [getattr(trace, field.name) for _, trace in terms]
        if isinstance(values[0], tuple):
            sums[field.name] = tuple(_dot(weights, column) for column in zip(*values, strict=True))
        else:
            sums[field.name] = _dot(weights, values)
    return replace(terms[0][1], **sums)


def _dot(weights: list[float], values: Iterable[int]) -> int:
    return round(sum(map(operator.mul, weights, values)))


class Tracker(TorchDispatchMode):
    """Counts the bytes of the tensors that are made while it is on and still live.

    Attributes:
        live: bytes now.
        owned: of them, bytes by `owner`, the part of the model that was running.
        peaks: the largest `live` of each `phase`.
        operators: how many ran.
    """

    def __init__(self, others: list[Tensor]):
        """`others`: tensors that are not counted, such as weights."""
        super().__init__()
        self.live = self.operators = 0
        self.owner = self.phase = "ends"
        self.owned: Counter[str] = Counter()
        self.peaks: Counter = Counter()
        # Of each storage, by its address, its owner and bytes.
        self._storages: dict[int, tuple[str, int]] = {}
        for tensor in others:
            self._storages[tensor.untyped_storage()._cdata] = ("", 0)

    def enter(self, phase) -> None:
        self.phase = phase
        self.peaks[phase] = max(self.peaks[phase], self.live)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.prim.device.default:
            # Half of all calls: code asks where a tensor lies, which a fake one says by itself.
            return args[0].fake_device
        self.operators += 1
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor)
        if self.live > self.peaks[self.phase]:
            self.peaks[self.phase] = self.live
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._storages:
            return
        size = storage.nbytes()
        self._storages[storage._cdata] = (self.owner, size)
        self.owned[self.owner] += size
        self.live += size
        weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        owner, size = self._storages.pop(address)
        self.owned[owner] -= size
        self.live -= size


class Passing:
    """The forward of a block that returns its input, in the form in which a model's blocks return their output."""

    def __init__(self, block: nn.Module, form: list[int]):
        """`form`: shared by a model's blocks; the number of values that a block returns, once one has run."""
        self.computes = block.forward
        self.form = form
        self.is_passing = True
        block.forward = self

    def __call__(self, hidden_states: Tensor, *args, **kwargs):
        if not self.is_passing:
            output = self.computes(hidden_states, *args, **kwargs)
            self.form[:] = [len(output) if isinstance(output, tuple) else 0]
            return output
        (values,) = self.form
        return (hidden_states, *([None] * (values - 1))) if values else hidden_states


class _Watch:
    """Tells a tracker which part of a model is running, and notes what lives when a part is left.

    Attributes:
        phase: the part whose backward pass is running.
        gradients: bytes of the gradients that the watched parameters have, after each of them; the first is 0.
    """

    phase = "outside"

    def __init__(self, model: nn.Module, block: nn.Module, tracker: Tracker, dtype: torch.dtype | None):
        """`dtype`: to which an engine casts the inputs of a block; None without a cast."""
        self.model = model
        self.tracker = tracker
        self.dtype = dtype
        self.gradients = [0]
        self.handles = [
            block.register_forward_pre_hook(self._enter_block, with_kwargs=True),
            block.register_forward_hook(self._leave_block),
        ]

    def count_gradients(self, module: nn.Module) -> None:
        for parameter in parameters_of(module):
            self.handles.append(parameter.register_post_accumulate_grad_hook(self._count_gradient))

    def peaks(self, phase: str, first: int = 0, last: int | None = None) -> tuple[int, ...]:
        """The peaks of a phase, from the first to the last number of gradients, without the gradients."""
        numbers = range(first, len(self.gradients) if last is None else last + 1)
        return tuple(self.tracker.peaks[phase, number] - self.gradients[number] for number in numbers)

    def enter(self, phase: str) -> None:
        self.phase = phase
        self.tracker.enter((phase, len(self.gradients) - 1))

    def before_block(self, hidden_states: Tensor) -> None:
        """The block is called with these hidden states."""

    def after_block(self, hidden_states: Tensor) -> None:
        """The block returned these hidden states."""

    def _count_gradient(self, parameter: nn.Parameter) -> None:
        self.gradients.append(self.gradients[-1] + parameter.grad.nbytes)
        self.enter(self.phase)

    def _enter_block(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if not _is_recomputed():
            self.before_block(args[0])
        if self.dtype is not None:
            args, kwargs = _apply_to_tensors(partial(_cast_fp_tensor, self.dtype), (args, kwargs))
        return args, kwargs

    def _leave_block(self, block: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        if not _is_recomputed():
            self.after_block(hidden_states_of(output))


def _is_recomputed() -> bool:
    """Whether a forward pass runs inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


class _BlockWatch(_Watch):
    """Notes what a block leaves."""

    start = others = end = 0

    def before_block(self, hidden_states: Tensor) -> None:
        self.tracker.enter("forward")
        self.start = self.tracker.live
        self.input = weakref.ref(hidden_states.untyped_storage())
        self.tracker.owner = "block"
        hidden_states.register_hook(self._leave_backward)

    def after_block(self, hidden_states: Tensor) -> None:
        self.output = weakref.ref(hidden_states.untyped_storage())
        self.tracker.owner = "rest"
        self.tracker.enter("rest")
        hidden_states.register_hook(self._enter_backward)

    def left(self) -> int:
        """What the block keeps now, without its output and with its input."""
        return self.tracker.owned["block"] - _size_of(self.output()) + _size_of(self.input())

    def kept_input(self) -> int:
        return _size_of(self.input())

    def of_ends(self) -> int:
        """What the ends made and still keep, without the block's input."""
        return self.tracker.owned["ends"] - _size_of(self.input())

    def _enter_backward(self, gradient: Tensor) -> None:
        # What does not belong to the block while it runs backward: the ends' gradients, and what they still keep.
        of_others = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.others = self.of_ends() + sum(gradient.nbytes for gradient in of_others)
        self.enter("backward")

    def _leave_backward(self, gradient: Tensor) -> None:
        self.end = self.tracker.live - self.others - self.gradients[-1]
        self.enter("ends")


def _size_of(storage: torch.UntypedStorage | None) -> int:
    return 0 if storage is None else storage.nbytes()


class _EndsWatch(_Watch):
    """Notes what the ends leave."""

    inside = head = carried = passed = end = 0

    def watch_head(self) -> None:
        self.handles.append(self.model.register_forward_hook(self._leave_model))
        head = self.model.get_output_embeddings()
        self.handles.append(head.register_forward_hook(self._leave_head))

    def after_block(self, hidden_states: Tensor) -> None:
        self.tracker.owner = "rest"
        self.inside = self.tracker.owned["ends"]
        self.hidden_states = weakref.ref(hidden_states.untyped_storage())
        hidden_states.register_hook(self._pass_backward)

    def kept(self) -> int:
        return self.tracker.owned["ends"] - _size_of(self.hidden_states())

    def _leave_head(self, head: nn.Module, args: tuple, output: Tensor) -> None:
        output.register_hook(self._enter_head)

    def _leave_model(self, model: nn.Module, args: tuple, output) -> None:
        self.enter("outside")

    def _enter_head(self, gradient: Tensor) -> None:
        self.head = self.tracker.live
        self.enter("loss")

    def _pass_backward(self, gradient: Tensor) -> None:
        self.passed = len(self.gradients) - 1
        self.end = self.tracker.live - self.gradients[-1]
        self.carried = self.end - self.tracker.owned["ends"] - gradient.nbytes
        self.enter("last")


@dataclass(frozen=True)
class Mode:
    """How a model computes.

    Attributes:
        precision: accelerate's mixed precision: "no", "bf16" or "fp16".
        is_cast: whether its weights and the inputs of its blocks are cast (FSDP); otherwise autocast casts what
            matrices are multiplied with.
        on_cpu: whether on a CPU, by code that is compiled for it where there is a compiler.
    """

    precision: str
    is_cast: bool
    on_cpu: bool = False

    @property
    def dtype(self) -> torch.dtype | None:
        """That of the weights and inputs that are cast; None if none are."""
        return LOW_PRECISION.get(self.precision) if self.is_cast else None


class Tracer:
    """Traces the parts of a model in one mode; each part of a batch once."""

    def __init__(self, config, options: StepOptions, mode: Mode, part: str):
        """`part`: what is recomputed (`Recomputed.part`)."""
        self.mode = mode
        kinds = list(dict.fromkeys(kinds_of_layers(config)))
        self._rounds = dict(zip(kinds_of_layers(config), _rounds(config), strict=True))
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with operators_of(mode.on_cpu), torch.random.fork_rng(devices=[]), self._fake:
            self._model = build(with_layers(without_dropout(config), kinds), options)
            recompute_activations(self._model, Recomputed(part))
            self._model.train()
            for parameter in self._model.parameters():
                parameter.data = parameter.data.to(mode.dtype or parameter.dtype)
        self._blocks = dict(zip(kinds, blocks_of(self._model), strict=True))
        self._first = kinds[0]
        self._form: list[int] = []
        self._passing = {kind: Passing(block, self._form) for kind, block in self._blocks.items()}
        self._traced: dict[tuple, Block | Ends] = {}
        # By kind and tokens of a text, how many operators its block ran.
        self._operators: dict[tuple[str, int], int] = {}
        self._is_compiled: dict[str, bool] = {}
        # By tokens of a text, the rows that were asked for first.
        self._first_rows: dict[int, int] = {}

    def block(self, kind: str, is_recomputed: bool, rows: int, tokens: int) -> Block:
        """The bytes of a block for `rows` texts of `tokens` tokens; `is_recomputed`: as a whole.

        Traced for the first number of rows that is asked for; twice as many show what does not grow with them.
        """
        first = self._first_rows.setdefault(tokens, rows)
        block = self._of_batch(kind, is_recomputed, first, tokens)
        if rows == first:
            return block
        fixed = self._fixed(kind, is_recomputed, first, tokens)
        return combined((rows / first, block), (1 - rows / first, fixed))

    def _of_batch(self, kind: str, is_recomputed: bool, rows: int, tokens: int) -> Block:
        """The bytes for texts that are traced, or that shorter ones stand for.

        More short texts, which have as many tokens in all, need as much but for what each text needs at its ends. That
        grows with the number of texts, so that two such batches show what fewer texts need.
        """
        short, longer = self._short_texts(kind, tokens)
        if short == tokens:
            return self._trace(kind, is_recomputed, rows, tokens, tokens)
        many, fewer = self._rows_of(short, rows, tokens), self._rows_of(longer, rows, tokens)
        of_many = self._trace(kind, is_recomputed, many, short, tokens)
        of_fewer = self._trace(kind, is_recomputed, fewer, longer, tokens)
        along = (tokens - short) / (longer - short)
        shared = combined((1 - along, of_many), (along, of_fewer)).shared
        if many * short == fewer * longer == rows * tokens:
            share = (many - rows) / (many - fewer)
            block = combined((1 - share, of_many), (share, of_fewer))
        else:
            # What one text needs is a straight line over its length.
            fixed = self._fixed(kind, is_recomputed, rows, tokens)
            first, second = rows * (1 - along) / many, rows * along / fewer
            block = combined((first, of_many), (second, of_fewer), (1 - first - second, fixed))
        return replace(block, shared=shared)

    def _fixed(self, kind: str, is_recomputed: bool, rows: int, tokens: int) -> Block:
        """What does not grow with the rows of a batch."""
        short, _ = self._short_texts(kind, tokens)
        rows = self._rows_of(short, rows, tokens)
        once = self._trace(kind, is_recomputed, rows, short, tokens)
        twice = self._trace(kind, is_recomputed, 2 * rows, short, tokens)
        return combined((2, once), (-1, twice))

    def _rows_of(self, short: int, rows: int, tokens: int) -> int:
        """How many short texts have about as many tokens as `rows` texts of `tokens` tokens."""
        return max(1, round(rows * tokens / short))

    def _short_texts(self, kind: str, tokens: int) -> tuple[int, int]:
        """The lengths of two texts that stand for texts of `tokens` tokens; `tokens` itself where it is short."""
        if self._rounds[kind] is None:
            return tokens, tokens
        short, tokens_of_round = self._rounds[kind]
        longer = short + MORE_ROUNDS * tokens_of_round
        if tokens <= longer or self.mode.on_cpu and self._takes_as_long(kind, short, longer):
            return tokens, tokens
        return short, longer

    def _takes_as_long(self, kind: str, short: int, longer: int) -> bool:
        """Whether a block runs as many operators for a longer text: compiled code goes over its rounds by itself."""
        if kind not in self._is_compiled:
            numbers = []
            for tokens in (short, longer):
                self._once(self._trace_block, kind, False, 1, tokens)
                numbers.append(self._operators[kind, tokens])
            self._is_compiled[kind] = numbers[0] == numbers[1]
        return self._is_compiled[kind]

    def _trace(self, kind: str, is_recomputed: bool, rows: int, tokens: int, of_tokens: int) -> Block:
        """The trace of texts that stand for texts of `of_tokens` tokens: as large a share of chunks is recomputed."""
        if tokens == of_tokens:
            return self._once(self._trace_block, kind, is_recomputed, rows, tokens)
        config = self._model.config
        kept = config.recompute_chunks
        chunks, of_chunks = (-(-number // config.memory_chunk_size) for number in (tokens, of_tokens))
        if 0 < kept < of_chunks:
            config.recompute_chunks = max(1, round(kept * chunks / of_chunks))
        try:
            return self._once(self._trace_block, kind, is_recomputed, rows, tokens)
        finally:
            config.recompute_chunks = kept

    def ends(self, rows: int, tokens: int, in_place: bool) -> Ends:
        """The bytes of the ends; `in_place` as in `fake.as_if_real`.

        A loss without whole logits goes over many tokens in chunks of at most D; eight chunks give all others.
        """
        self._learn_form()
        width = self._model.config.hidden_size
        few = -(-4 * width // tokens)
        if rows <= 2 * few:
            return self._once(self._trace_ends, rows, tokens, in_place)
        start = self._once(self._trace_ends, few, tokens, in_place)
        end = self._once(self._trace_ends, 2 * few, tokens, in_place)
        more = rows / few - 1
        return combined((1 - more, start), (more, end))

    def _learn_form(self) -> None:
        """Run the first block once, which no other has to pass, if none has run."""
        if not self._form:
            self.block(self._first, False, rows=1, tokens=FEW_TOKENS)

    def _once(self, trace: Callable, *part):
        key = trace.__name__, getattr(self._model.config, "recompute_chunks", None), *part
        if key not in self._traced:
            self._traced[key] = trace(*part)
        return self._traced[key]

    def _forget(self, watch: _Watch) -> None:
        for handle in watch.handles:
            handle.remove()
        for parameter in self._model.parameters():
            parameter.grad = None

    @contextmanager
    def _tracking(self, tokens: int, in_place: bool) -> Iterator[Tracker]:
        model = self._model
        tracker = Tracker([*model.parameters(), *model.buffers()])
        with as_if_real(self._fake, model, tokens, in_place), tracker:
            yield tracker

    def _trace_block(self, kind: str, is_recomputed: bool, rows: int, tokens: int) -> Block:
        block = self._blocks[kind]
        passing = self._passing[kind]
        if kind != self._first:
            self._learn_form()
        passing.is_passing = False
        block.gradient_checkpointing = is_recomputed
        with self._tracking(tokens, in_place=True) as tracker:
            watch = _BlockWatch(self._model, block, tracker, self.mode.dtype)
            watch.count_gradients(block)
            inputs = torch.zeros((rows, tokens), dtype=torch.long)
            with autocast(self.mode.precision):
                outputs = self._model.base_model(input_ids=inputs)
                # With the states of the text, which the model's output holds.
                inside = watch.left()
                hidden_states = outputs.last_hidden_state
                del outputs
            kept = watch.left()
            kept_input = watch.kept_input()
            shared = watch.of_ends() - inputs.nbytes
            total = hidden_states.sum()
            del hidden_states
            total.backward()
        self._forget(watch)
        self._operators[kind, tokens] = tracker.operators
        passing.is_passing = True
        block.gradient_checkpointing = False
        return Block(
            forward=tracker.peaks["forward"] - watch.start,
            inside=inside,
            kept=kept,
            input=kept_input,
            shared=shared,
            backward=tuple(peak - watch.others for peak in watch.peaks("backward")),
            end=watch.end,
            gradients=tuple(watch.gradients),
        )

    def _trace_ends(self, rows: int, tokens: int, in_place: bool) -> Ends:
        model = self._model
        *_, last = self._blocks.values()
        forward = model.forward
        with self._tracking(tokens, in_place) as tracker:
            watch = _EndsWatch(model, last, tracker, self.mode.dtype)
            watch.count_gradients(model)
            watch.watch_head()
            inputs = torch.zeros((rows, tokens), dtype=torch.long)
            skips_logits = can_skip_logits(model)
            if self.mode.precision in LOW_PRECISION:
                model.forward = in_precision(forward, self.mode.precision)
            loss = summed_loss(model, {"input_ids": inputs}, inputs, skips_logits) * 1e-3
            model.forward = forward
            kept = watch.kept()
            loss.backward()
        self._forget(watch)
        return Ends(
            inside=watch.inside,
            kept=kept,
            forward=tracker.peaks["ends"],
            outside=tracker.peaks["outside", 0],
            head=watch.head,
            loss=watch.peaks("loss", last=watch.passed),
            end=watch.end,
            carried=watch.carried,
            last=watch.peaks("last", first=watch.passed),
            loss_gradients=tuple(watch.gradients[: watch.passed + 1]),
            last_gradients=tuple(watch.gradients[watch.passed :]),
        )


def _rounds(config) -> list[tuple[int, int] | None]:
    """`layers.Mixer.rounds` of each layer; None for other architectures."""
    if config.model_type != "hope":
        return [None] * config.num_hidden_layers
    return [mixer.rounds(config) for mixer in config.mixers]
