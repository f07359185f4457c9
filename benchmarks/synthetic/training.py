"""Train a small model on fresh samples of a task, and test it on fixed samples."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hope_hf.common.progress import progress

from .task import Batch, Task, loss, score

# Steps between checks. Small, since a model may count exactly for a few dozen steps only.
CHECK_EVERY = 10
# Enough samples that a passing model is right on at least 99.7 % of all samples with 95 % confidence.
CHECK_SAMPLES = 1024
WARM_UP_STEPS = 50
LAST_RATE = 0.1
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
# Offsets of the seeds of the check's and of the test's samples; no training uses these seeds.
CHECK_STREAM, TEST_STREAM = 10**9, 2 * 10**9


class Diverged(ValueError):
    """A loss that is not finite."""


@dataclass(frozen=True)
class Trained:
    """A trained model: a module from token ids [B, T] to logits [B, T, V], and its number of training steps.

    With an `ema_decay` it has the mean weights, unless the last step's weights passed the check first.
    """

    module: nn.Module
    steps: int


def train(task: Task, model: nn.Module, seed: int, device: torch.device) -> Trained:
    """AdamW on fresh samples, warm-up then a cosine to a tenth of the rate.

    Stops early once all check samples of the checked bins are right. They are drawn separately from the samples of
    training and test. With an `ema_decay` the weights of the step or their mean may pass: training may lose an exact
    count again, and the mean may count right where single steps drift. A language of few words has no separate
    samples: the check uses the tested words, the longer bin's included, as in Irie et al. 2023. Raises Diverged if
    the loss is not finite.
    """
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        module = task.attach(model).to(device).train()
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=task.learning_rate, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_at(step, task.max_train_steps))
    mean = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(task.ema_decay)) if task.ema_decay else None
    candidates = [module, mean.module] if mean else [module]
    generator = torch.Generator().manual_seed(seed)
    checks = list(fixed_samples(task, seed + CHECK_STREAM, CHECK_SAMPLES).values())[: task.checked]
    bar = progress(range(1, task.max_train_steps + 1), task.name)
    for step in bar:
        batch = task.draw(task.batch_size, generator, None).to(device)
        value = loss(module(batch.input_ids), batch)
        if not math.isfinite(value.item()):
            raise Diverged(
                f"Task {task.name}: the loss became {value.item()} at step {step}; "
                f"try a --learning_rate below {task.learning_rate:g}."
            )
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(module.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        if mean:
            mean.update_parameters(module)
        bar.set_postfix_str(f"loss {value.item():.3f}", refresh=False)
        if step % CHECK_EVERY == 0:
            for candidate in candidates:
                # The longest samples are checked first, since models learn them last.
                if all(all_right(task, candidate, samples, device) for samples in reversed(checks)):
                    return Trained(candidate, step)
    return Trained(candidates[-1], task.max_train_steps)


def rate_at(step: int, steps: int) -> float:
    """Share of the peak rate at `step` (from 0) of `steps`: linear warm-up, then a cosine to a tenth."""
    warm_up = min(WARM_UP_STEPS, max(1, steps // 10))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * min(1.0, done))) / 2


def fixed_samples(task: Task, seed: int, count: int) -> dict[str, Batch]:
    """At most `count` different samples of each bin; the same for every model."""
    generator = torch.Generator().manual_seed(seed)
    return {name: task.draw(count, generator, index).distinct() for index, name in enumerate(task.bins)}


def all_right(task: Task, module: nn.Module, samples: Batch, device: torch.device) -> bool:
    """Whether every sample is right. Stops at the first batch with a wrong one: most checks come too early."""
    size = task.batch_size
    batches = (samples.rows(start, start + size) for start in range(0, len(samples), size))
    return all(score_samples(task, module, batch, size, device).min() == 1 for batch in batches)


@torch.no_grad()
def score_samples(task: Task, module: nn.Module, samples: Batch, batch_size: int, device: torch.device) -> Tensor:
    """The score of each sample, [N] float64 on the CPU; the module keeps its mode (training or evaluation).

    Raises ValueError that names the task if the logits are not finite.
    """
    was_training = module.training
    module.eval()
    scores = []
    for start in range(0, len(samples), batch_size):
        batch = samples.rows(start, start + batch_size).to(device)
        try:
            scores.append(score(module(batch.input_ids), batch).cpu())
        except ValueError as error:
            raise ValueError(
                f"Task {task.name} cannot be scored: {error}; try a --learning_rate below {task.learning_rate:g}."
            ) from None
    module.train(was_training)
    return torch.cat(scores)
