"""A model reads a text piece by piece: with fixed weights, with levels that learn, or with all weights trained.

Every piece is scored with what the pieces before it have taught. The first token of a piece is not scored.
"""

import copy
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from hope_hf import HopeCache

FROZEN, LEARNING = "frozen", "learning"


class Reading:
    """One sequence that a model reads.

    Args:
        model: a HOPE in evaluation mode.
        learn: whether the levels learn from what they read.
        inside: makes a context for each call, such as one with frozen memories.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        learn: bool = False,
        inside: Callable[[PreTrainedModel], AbstractContextManager] = nullcontext,
    ):
        self.model = model
        self.learn = learn
        self.inside = inside
        self.cache = HopeCache(model.config)
        self.losses: list[float] = []
        """Mean loss of each piece, in nats per token."""
        self.seconds = 0.0
        """CPU seconds of all threads, the scores included."""

    def read(self, ids: Tensor) -> None:
        """Read and score the next piece [T]."""
        start = time.process_time()
        loss = self._loss(ids[None])
        self.seconds += time.process_time() - start
        self.losses.append(loss)

    def _loss(self, ids: Tensor) -> float:
        options = {"learn": True} if self.learn else {}
        with torch.no_grad(), self.inside(self.model):
            output = self.model(ids, labels=ids, cache=self.cache, skip_logits=True, **options)
        return output.loss.item()


class TrainedReading(Reading):
    """A copy of the model, of which an optimizer changes all weights after each piece.

    The optimizer has the weights in float32, whatever the model's dtype: steps added to bfloat16 are rounded away.

    Args:
        make_optimizer: gets the list of weights.
    """

    def __init__(self, model: PreTrainedModel, make_optimizer: Callable[[list[Tensor]], Optimizer]):
        trained = copy.deepcopy(model).requires_grad_(True)
        super().__init__(trained, learn=True)
        self.weights = list(trained.parameters())
        self.masters = []
        for weight in self.weights:
            master = weight.detach().float().clone()
            self.masters.append(master.requires_grad_())
        self.optimizer = make_optimizer(self.masters)

    def _loss(self, ids: Tensor) -> float:
        if not self.learn:
            return super()._loss(ids)
        loss = self.model(ids, labels=ids, cache=self.cache, skip_logits=True).loss
        loss.backward()
        self.cache.detach_()
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()
            weight.grad = None
        self.optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        return loss.item()


def frozen_and_learning(model: PreTrainedModel) -> dict[str, Reading]:
    """The two readings of a model, by the names that the tables give them."""
    return {FROZEN: Reading(model), LEARNING: Reading(model, learn=True)}


def read_in_turn(
    readings: Iterable[Reading], ids: Tensor, piece: int, after: Callable[[int], None] | None = None
) -> None:
    """All readings read `ids` [T] in pieces; after a piece of one, the others read the same piece.

    So another program on the machine slows all of them alike. `after` gets the number of tokens read.
    """
    for start in range(0, len(ids), piece):
        part = ids[start : start + piece]
        for reading in readings:
            reading.read(part)
        if after:
            after(start + len(part))
