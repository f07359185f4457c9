"""Classes learned by fine-tuning a copy of the model on one group after another."""

import copy
import math
import random
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hope_hf.common.progress import progress
from hope_hf.common.results import IGNORED
from hope_hf.optim import build_optimizer

from ..result import CannotRun
from ..subject import Subject
from .classes import ClassGroups, Example, Hits
from .in_context import context_of, label_of, questions, read

STEPS = 100
BATCH_SIZE = 16
LEARNING_RATE = 5e-4
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
EPSILON = 1e-8
MAX_GRAD_NORM = 1.0


def learn_by_fine_tuning(
    subject: Subject, groups: ClassGroups, steps: int, batch_size: int, rate: float, rows: int, seed: int, name: str
) -> tuple[list[Hits], dict[str, Hits]]:
    """The hits after `steps` of AdamW on each group's examples, one group after the other, and the control's hits.

    Levels of HOPE step by their own clocks, as in a training. The control, `joint`, is another copy that learns
    all groups' examples together for as many steps. Raises ValueError if the loss is not finite.
    """
    count = len(groups.names)
    hits = []
    with progress(None, name, 2 * steps * count) as bar:
        learner = _Learner(subject, groups, batch_size, rate, seed, bar)
        for index, examples in enumerate(groups.train):
            learner.train(examples, steps)
            hits.append(learner.questions(index + 1, rows))
        together = _Learner(subject, groups, batch_size, rate, seed, bar)
        together.train(list(chain.from_iterable(groups.train)), steps * count)
        joint = together.questions(count, rows)
    return hits, {"joint": joint}


class _Learner:
    """A copy of the model and its optimizer, which is kept from group to group."""

    def __init__(self, subject: Subject, groups: ClassGroups, batch_size: int, rate: float, seed: int, bar):
        self._subject = replace(subject, model=copy.deepcopy(subject.model))
        self._groups = groups
        self._batch_size = batch_size
        self._bar = bar
        self._generator = random.Random(f"fine-tuning {seed}")
        lengths = []
        for examples in groups.train:
            for example in examples[:8]:
                ids, _ = self._row(example)
                lengths.append(len(ids))
        # The periods of the levels are counted in tokens.
        tokens = round(batch_size * sum(lengths) / len(lengths))
        self._optimizer = build_optimizer(
            self._subject.model, "adamw", rate, WEIGHT_DECAY, BETAS, EPSILON, tokens_per_step=tokens
        )

    def train(self, examples: list[Example], steps: int):
        """Steps on batches drawn from `examples`; the loss counts the tokens of the labels."""
        model = self._subject.model.train()
        for _ in range(steps):
            ids, targets = self._batch(self._generator.choices(examples, k=self._batch_size))
            logits = model(input_ids=ids, use_cache=False).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
            descend(model, self._optimizer, loss, "class_incremental")
            self._bar.update()
        model.eval()

    def questions(self, num_groups: int, rows: int) -> Hits:
        """The hits of `in_context.questions` after the start token alone."""
        cache = read(self._subject, [self._subject.start])
        return questions(self._subject, cache, self._groups, num_groups, rows)

    def _batch(self, examples: list[Example]) -> tuple[Tensor, Tensor]:
        """Token ids and targets [B, T], padded on the right."""
        all_ids, all_targets = zip(*map(self._row, examples), strict=True)
        ids = pad_sequence(all_ids, batch_first=True)
        targets = pad_sequence(all_targets, batch_first=True, padding_value=IGNORED)
        device = self._subject.model.device
        return ids.to(device), targets.to(device)

    def _row(self, example: Example) -> tuple[Tensor, Tensor]:
        """Token ids and targets [T]: the target of a position is the next token if it belongs to the label."""
        context = [self._subject.start, *context_of(self._subject, example)]
        label = label_of(self._subject, self._groups.labels[example.label])
        ids = torch.tensor(context + label)
        targets = ids[1:].clone()
        targets[: len(context) - 1] = IGNORED
        return ids[:-1], targets


def descend(model: PreTrainedModel, optimizer: torch.optim.Optimizer, loss: Tensor, suite: str) -> None:
    """One step of the optimizer on a loss, its gradient clipped; CannotRun if the loss is not finite."""
    if not math.isfinite(loss.item()):
        raise CannotRun(f"{suite}: the loss of fine-tuning is not finite: lower --learning_rate.")
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
