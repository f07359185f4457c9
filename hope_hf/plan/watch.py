"""Hooks that tell a tracker which part of a model is running, and note what lives when a part is left."""

import weakref
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import _cast_fp_tensor
from torch.distributed.utils import _apply_to_tensors

from .allocations import Block, Ends
from .as_if_real import is_in_backward
from .tracker import Tracker


class Watch:
    """Watches a step with one block.

    Attributes:
        phase: the part whose backward pass is running.
        gradients: bytes of the gradients that the watched parameters have, after each of them; the first is 0.
    """

    phase = "outside"

    def __init__(
        self, model: nn.Module, block: nn.Module, watched: nn.Module, tracker: Tracker, dtype: torch.dtype | None
    ):
        """`watched`: whose gradients are counted. `dtype`: to which an engine casts the inputs of a block, or None."""
        self.model = model
        self.tracker = tracker
        self.dtype = dtype
        self.gradients = [0]
        self.handles = [
            block.register_forward_pre_hook(self._enter_block, with_kwargs=True),
            block.register_forward_hook(self._leave_block),
        ]
        for parameter in watched.parameters():
            if parameter.requires_grad:
                self.handles.append(parameter.register_post_accumulate_grad_hook(self._count_gradient))

    def remove(self) -> None:
        """Take the hooks and the gradients away."""
        for handle in self.handles:
            handle.remove()
        for parameter in self.model.parameters():
            parameter.grad = None

    def enter(self, phase: str) -> None:
        """The backward pass of a part begins."""
        self.phase = phase
        self.tracker.enter((phase, len(self.gradients) - 1))

    def before_block(self, hidden_states: Tensor) -> None:
        """The block is called with these hidden states [B, T, D]."""

    def after_block(self, hidden_states: Tensor) -> None:
        """The block returned these hidden states [B, T, D]."""

    def peaks(self, phase: str, first: int, last: int) -> tuple[int, ...]:
        """The peaks of a phase, from the first to the last number of gradients, without the gradients."""
        sizes = []
        for number in range(first, last + 1):
            peak = self.tracker.peaks[phase, number]
            sizes.append(peak - self.gradients[number])
        return tuple(sizes)

    def _owned(self, owner: str, but: weakref.ref) -> int:
        """What a part made and still keeps, without the storage `but`."""
        return self.tracker.owned[owner] - _size_of(but)

    def _count_gradient(self, parameter: nn.Parameter) -> None:
        before = self.gradients[-1]
        self.gradients.append(before + parameter.grad.nbytes)
        self.enter(self.phase)

    def _enter_block(self, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        # inside it the block is recomputed
        if not is_in_backward():
            self.before_block(args[0])
        if self.dtype is None:
            return args, kwargs
        return _apply_to_tensors(partial(_cast_fp_tensor, self.dtype), (args, kwargs))

    def _leave_block(self, block: nn.Module, args: tuple, output: Tensor | tuple) -> None:
        if not is_in_backward():
            self.after_block(output[0] if isinstance(output, tuple) else output)


class BlockWatch(Watch):
    """Notes what a block leaves."""

    start = others = end = 0
    inside = kept = kept_input = shared = 0

    def __init__(self, model: nn.Module, block: nn.Module, tracker: Tracker, dtype: torch.dtype | None):
        super().__init__(model, block, block, tracker, dtype)

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

    def note_inside(self) -> None:
        """The model's forward pass ends."""
        self.inside = self._left()

    def note_kept(self, inputs: Tensor) -> None:
        """What is there now is kept for the backward pass; `inputs` [B, T]: token ids, which no block reads."""
        self.kept = self._left()
        self.kept_input = _size_of(self.input)
        self.shared = self._owned("ends", but=self.input) - inputs.nbytes

    def block(self) -> Block:
        """What was noted."""
        backward = []
        for peak in self.peaks("backward", 0, len(self.gradients) - 1):
            backward.append(peak - self.others)
        return Block(
            forward=self.tracker.peaks["forward"] - self.start,
            inside=self.inside,
            kept=self.kept,
            input=self.kept_input,
            shared=self.shared,
            backward=tuple(backward),
            end=self.end,
            gradients=tuple(self.gradients),
            operators=self.tracker.operators,
        )

    def _left(self) -> int:
        """What the block keeps now, without its output and with its input."""
        return self._owned("block", but=self.output) + _size_of(self.input)

    def _enter_backward(self, gradient: Tensor) -> None:
        # What does not belong to the block while it runs backward: the ends' gradients, and what they still keep.
        self.others = self._owned("ends", but=self.input)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                self.others += parameter.grad.nbytes
        self.enter("backward")

    def _leave_backward(self, gradient: Tensor) -> None:
        self.end = self.tracker.live - self.others - self.gradients[-1]
        self.enter("ends")


class EndsWatch(Watch):
    """Notes what the ends leave, while every block passes its input on."""

    inside = kept = head = carried = passed = end = 0

    def __init__(self, model: nn.Module, last: nn.Module, tracker: Tracker, dtype: torch.dtype | None):
        """`last`: the last block."""
        super().__init__(model, last, model, tracker, dtype)
        self.handles.append(model.register_forward_hook(self._leave_model))
        head = model.get_output_embeddings()
        self.handles.append(head.register_forward_hook(self._leave_head))

    def after_block(self, hidden_states: Tensor) -> None:
        self.tracker.owner = "rest"
        self.inside = self.tracker.owned["ends"]
        self.hidden_states = weakref.ref(hidden_states.untyped_storage())
        hidden_states.register_hook(self._pass_backward)

    def note_kept(self) -> None:
        """What is there now is kept for the backward pass."""
        self.kept = self._owned("ends", but=self.hidden_states)

    def ends(self) -> Ends:
        """What was noted."""
        return Ends(
            inside=self.inside,
            kept=self.kept,
            forward=self.tracker.peaks["ends"],
            outside=self.tracker.peaks["outside", 0],
            head=self.head,
            loss=self.peaks("loss", 0, self.passed),
            end=self.end,
            carried=self.carried,
            last=self.peaks("last", self.passed, len(self.gradients) - 1),
            loss_gradients=tuple(self.gradients[: self.passed + 1]),
            last_gradients=tuple(self.gradients[self.passed :]),
        )

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
        owned = self.tracker.owned["ends"]
        self.carried = self.end - owned - gradient.nbytes
        self.enter("last")


def _size_of(reference: weakref.ref) -> int:
    """Bytes of a storage; 0 if it is gone."""
    storage = reference()
    return 0 if storage is None else storage.nbytes()
