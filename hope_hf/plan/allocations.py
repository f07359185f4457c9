"""Bytes that the parts of a model allocate in a training step.

The parts are its blocks, and the ends, which stand before and after the blocks: embedding, last norm, head and loss.
"""

import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial


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
        operators: how many operators ran, which is no size; 0 if none was watched.
    """

    forward: int
    inside: int
    kept: int
    input: int
    shared: int
    backward: tuple[int, ...]
    end: int
    gradients: tuple[int, ...]
    operators: int = 0

    @property
    def steps(self) -> list[tuple[int, int]]:
        """The peaks of its backward pass, each with its gradients."""
        return list(zip(self.backward, self.gradients, strict=True))


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

    @property
    def loss_steps(self) -> list[tuple[int, int]]:
        """The peaks of the loss's backward pass, each with the gradients."""
        return list(zip(self.loss, self.loss_gradients, strict=True))

    @property
    def last_steps(self) -> list[tuple[int, int]]:
        """The peaks below the blocks, each with the gradients that were not there after the loss."""
        after_loss = self.loss_gradients[-1]
        steps = []
        for peak, size in zip(self.last, self.last_gradients, strict=True):
            steps.append((peak, size - after_loss))
        return steps


def combined(*terms: tuple[float, Block | Ends]) -> Block | Ends:
    """The sum of parts times their weights, field by field, rounded to whole bytes."""
    weights, parts = zip(*terms, strict=True)
    weighted = partial(_weighted, weights)
    first = parts[0]
    sums = {}
    for name, value in vars(first).items():
        sizes = list(map(operator.attrgetter(name), parts))
        if isinstance(value, tuple):
            columns = zip(*sizes, strict=True)
            sums[name] = tuple(map(weighted, columns))
        else:
            sums[name] = weighted(sizes)
    return type(first)(**sums)


def _weighted(weights: Iterable[float], sizes: Iterable[int]) -> int:
    terms = map(operator.mul, weights, sizes)
    return round(sum(terms))
