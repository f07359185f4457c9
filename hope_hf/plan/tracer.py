"""The forward and backward pass of a block, and of the ends, on fake tensors.

A model with one block of each kind takes them with the trainer's own code, one block at a time while the others pass
their input on. A tracker counts the bytes of all tensors that live, and hooks tell it what is running.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hope_hf.common.objective import can_skip_logits, summed_loss
from hope_hf.common.precision import LOW_PRECISION
from hope_hf.common.recompute import recompute_activations
from hope_hf.common.recompute_flag import Recomputed

from .allocations import Block, Ends
from .as_if_real import as_if_real
from .fake import autocast, build, in_precision, kinds_of_layers, operators_of, with_layers, without_dropout
from .launch import Mode, StepOptions
from .shapes import blocks_of
from .tracker import Tracker
from .watch import BlockWatch, EndsWatch

# Tokens of a text that only shows what a block returns.
FEW_TOKENS = 16


@dataclass(frozen=True)
class Layer:
    """The kind of a layer, and whether its block is recomputed as a whole."""

    kind: str
    is_recomputed: bool = False


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
            values = len(output) if isinstance(output, tuple) else 0
            self.form[:] = [values]
            return output
        (values,) = self.form
        if values == 0:
            return hidden_states
        others = [None] * (values - 1)
        return hidden_states, *others


class Tracer:
    """Traces the parts of a model in one mode; each part of a batch once.

    Attributes:
        config: of a model with one block of each kind.
    """

    def __init__(self, config, options: StepOptions, mode: Mode, part: str):
        """`part`: what is recomputed (`Recomputed.part`)."""
        self.mode = mode
        kinds = list(dict.fromkeys(kinds_of_layers(config)))
        self.config = with_layers(without_dropout(config), kinds)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        with operators_of(mode.on_cpu), torch.random.fork_rng(devices=[]), self._fake:
            model = build(self.config, options)
            recompute_activations(model, Recomputed(part))
            model.train()
            for parameter in model.parameters():
                dtype = mode.dtype or parameter.dtype
                parameter.data = parameter.data.to(dtype)
        self._model = model
        self._blocks = dict(zip(kinds, blocks_of(model), strict=True))
        self._first = kinds[0]
        self._form: list[int] = []
        self._passing = {}
        for kind, block in self._blocks.items():
            self._passing[kind] = Passing(block, self._form)
        self.block = cache(self._trace_block)
        self.ends = cache(self._trace_ends)

    def _trace_block(self, layer: Layer, rows: int, tokens: int, recompute_chunks: int | None) -> Block:
        """The bytes of a block for `rows` texts of `tokens` tokens.

        `recompute_chunks`: the field of a HOPE's config; None for other architectures.
        """
        kind = layer.kind
        if kind != self._first:
            self._learn_form()
        if recompute_chunks is not None:
            self._model.config.recompute_chunks = recompute_chunks
        block = self._blocks[kind]
        passing = self._passing[kind]
        passing.is_passing = False
        block.gradient_checkpointing = layer.is_recomputed
        with self._tracking(tokens, in_place=True) as tracker:
            watch = BlockWatch(self._model, block, tracker, self.mode.dtype)
            inputs = torch.zeros((rows, tokens), dtype=torch.long)
            with autocast(self.mode.precision):
                outputs = self._model.base_model(input_ids=inputs)
                # With the states of the text, which the model's output holds.
                watch.note_inside()
                hidden_states = outputs.last_hidden_state
                del outputs
            watch.note_kept(inputs)
            total = hidden_states.sum()
            del hidden_states
            total.backward()
        watch.remove()
        passing.is_passing = True
        block.gradient_checkpointing = False
        return watch.block()

    def _trace_ends(self, rows: int, tokens: int, in_place: bool) -> Ends:
        """The bytes of the ends; `in_place` as in `as_if_real`."""
        self._learn_form()
        model = self._model
        *_, last = self._blocks.values()
        forward = model.forward
        with self._tracking(tokens, in_place) as tracker:
            watch = EndsWatch(model, last, tracker, self.mode.dtype)
            inputs = torch.zeros((rows, tokens), dtype=torch.long)
            skips_logits = can_skip_logits(model)
            if self.mode.precision in LOW_PRECISION:
                model.forward = in_precision(forward, self.mode.precision)
            loss = summed_loss(model, {"input_ids": inputs}, inputs, skips_logits) * 1e-3
            model.forward = forward
            watch.note_kept()
            loss.backward()
        watch.remove()
        return watch.ends()

    def _learn_form(self) -> None:
        """Run the first block once, which no other has to pass, if none has run."""
        if not self._form:
            recompute_chunks = getattr(self.config, "recompute_chunks", None)
            self.block(Layer(self._first), 1, FEW_TOKENS, recompute_chunks)

    @contextmanager
    def _tracking(self, tokens: int, in_place: bool) -> Iterator[Tracker]:
        model = self._model
        tracker = Tracker([*model.parameters(), *model.buffers()])
        with as_if_real(self._fake, model, tokens, in_place), tracker:
            yield tracker
