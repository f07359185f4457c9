"""A synthetic task: its samples, the scored positions, and the score of an answer."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """Samples of a task.

    input_ids: [B, T], int64.
    targets: what the logits at the same position must predict: one symbol, [B, T] int64, or a set of symbols, [B, T,
        V] bool. Nothing is shifted here.
    mask: [B, T] bool, the scored positions; elsewhere `targets` is ignored. Every row has at least one.
    """

    input_ids: Tensor
    targets: Tensor
    mask: Tensor

    def __len__(self) -> int:
        return len(self.input_ids)

    def to(self, device: torch.device) -> "Batch":
        """The same samples on another device."""
        return Batch(self.input_ids.to(device), self.targets.to(device), self.mask.to(device))

    def rows(self, start: int, stop: int) -> "Batch":
        """The samples from `start` up to, but not including, `stop`."""
        return Batch(self.input_ids[start:stop], self.targets[start:stop], self.mask[start:stop])

    def distinct(self) -> "Batch":
        """Without repeated samples: a language of 25 words has no more than 25 samples."""
        marks = torch.cat([self.input_ids, self.mask], 1).tolist()
        first = {tuple(row): index for index, row in reversed(list(enumerate(marks)))}
        keep = sorted(first.values())
        return Batch(self.input_ids[keep], self.targets[keep], self.mask[keep])


def loss(logits: Tensor, batch: Batch) -> Tensor:
    """Mean loss over the scored positions, in nats: cross-entropy for symbols, for sets the binary cross-entropy of
    one sigmoid per symbol, averaged over the symbols. `logits` are [B, T, V]."""
    logits, targets = logits[batch.mask].float(), batch.targets[batch.mask]
    if targets.dtype == torch.bool:
        return F.binary_cross_entropy_with_logits(logits, targets.float())
    return F.cross_entropy(logits, targets)


def score(logits: Tensor, batch: Batch) -> Tensor:
    """The score of each sample, [B] float64 from 0 to 1; `logits` are [B, T, V].

    Symbols: the share of the sample's scored positions whose likeliest symbol is the target. Sets: 1 where at every
    scored position exactly the symbols of the set have a positive logit, else 0. Raises ValueError for logits that are
    not finite.
    """
    if not torch.isfinite(logits[batch.mask]).all():
        raise ValueError("its logits are not finite")
    if batch.targets.dtype == torch.bool:
        right = ((logits > 0) == batch.targets).all(-1)
        return (right | ~batch.mask).all(-1).double()
    right = (logits.argmax(-1) == batch.targets) & batch.mask
    return right.sum(-1).double() / batch.mask.sum(-1)


def chance(batch: Batch, vocab_size: int) -> float:
    """The expected score of a uniform guess, over symbols or over membership of each symbol in a set."""
    if batch.targets.dim() == 3:
        return float((0.5 ** (batch.mask.sum(1).double() * vocab_size)).mean())
    return 1 / vocab_size


class LogitsOf(nn.Module):
    """A causal language model as a function from token ids [B, T] to its logits [B, T, V]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids=input_ids, use_cache=False).logits


@dataclass(frozen=True)
class Task:
    """A synthetic task, and its default settings for training a small model.

    name: as in `--tasks`.
    vocab_size: symbols V of inputs and targets together.
    bins: names of the kinds of samples that are evaluated separately (ranges of lengths); training uses the first.
    draw: `draw(rows, generator, bin)` returns a `Batch` of `rows` independent samples on the CPU; bin `None` draws
        training samples. The generator is a CPU generator and the only source of randomness.
    attach: makes a module from a causal language model; its forward maps token ids to logits.
    max_train_steps, batch_size, learning_rate, samples: training steps, rows per step, peak rate, and evaluated
        samples per bin.
    checked: bins, from the first on, whose samples must all be right for the training to end early; None: all.
    ema_decay: decay per step of an exponentially weighted mean of the weights, which is tested as well; 0: none.
    """

    name: str
    vocab_size: int
    bins: tuple[str, ...]
    draw: Callable[[int, torch.Generator, int | None], Batch]
    attach: Callable[[nn.Module], nn.Module] = LogitsOf
    max_train_steps: int = 1000
    batch_size: int = 32
    learning_rate: float = 3e-3
    samples: int = 256
    checked: int | None = None
    ema_decay: float = 0.0

    def with_settings(self, **given: float | None) -> "Task":
        """The task with the user's settings that are not None."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})
