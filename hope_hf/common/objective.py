"""The next-token loss as a sum. The caller divides it by the number of valid tokens of all processes."""

import inspect

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .results import IGNORED


def count_valid(labels: Tensor) -> int:
    """Number of predicted tokens of `labels` [B, T]; the first token of a row is not predicted."""
    return int((labels[:, 1:] != IGNORED).sum())


def summed_loss(model: nn.Module, inputs: dict, labels: Tensor, skips_logits: bool) -> Tensor:
    """Sum of -log p(label) in nats over the valid tokens of a forward pass, an fp32 scalar.

    Args:
        model: wrapped by the engine; called with `inputs`.
        labels: [B, T], not shifted.
        skips_logits: whether the model computes the loss without whole logits (`can_skip_logits`).
    """
    if skips_logits:
        return model(**inputs, labels=labels, num_items_in_batch=1, skip_logits=True).loss
    return loss_of_logits(model(**inputs).logits, labels)


def can_skip_logits(model: nn.Module) -> bool:
    """Whether the forward of an unwrapped model has the argument `skip_logits`, as HOPE's does."""
    return "skip_logits" in inspect.signature(type(model).forward).parameters


def loss_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """`summed_loss` from logits [B, T, V] of any float dtype."""
    predictions = logits[:, :-1].flatten(0, 1).float()
    targets = labels[:, 1:].flatten().to(logits.device)
    return F.cross_entropy(predictions, targets, ignore_index=IGNORED, reduction="sum")


def model_inputs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's inputs from a batch on the CPU.

    `position_ids` are left out if no document starts inside a row: models then use their fast path.
    """
    inputs = {"input_ids": batch["input_ids"]}
    positions = batch.get("position_ids")
    if positions is not None:
        starts_inside = (positions != torch.arange(positions.shape[1])).any()
        if starts_inside:
            inputs["position_ids"] = positions
    return inputs


@torch.no_grad()
def check_token_ids(batch: dict[str, Tensor], vocab_size: int):
    """ValueError if a token id has no row in the embedding; `batch` on the CPU."""
    lowest, highest = batch["input_ids"].aminmax()
    if lowest < 0 or highest >= vocab_size:
        outside = int(lowest if lowest < 0 else highest)
        raise ValueError(
            f"The data holds token id {outside}, outside the model's vocabulary of {vocab_size:,}: "
            "tokenize it with the tokenizer of this model (--tokenizer_name)."
        )
