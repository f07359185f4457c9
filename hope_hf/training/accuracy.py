"""The share of tokens that the model ranks first, as a metric of the library `evaluate`."""

from functools import cache

import torch
from torch import Tensor

from hope_hf.cli.results import IGNORED, next_token_accuracy


@torch.no_grad()
def right_tokens(logits: Tensor, labels: Tensor) -> float:
    """How many valid tokens are the most probable one.

    logits [B, T, V]; labels [B, T] not shifted.
    """
    predictions, references = logits[:, :-1].argmax(dim=-1).cpu().flatten(), labels[:, 1:].cpu().flatten()
    valid = references != IGNORED
    if not valid.any():
        return 0.0
    accuracy = _metric().compute(predictions=predictions[valid].numpy(), references=references[valid].numpy())
    return accuracy["accuracy"] * int(valid.sum())


# One for all batches: making it takes longer than using it.
_metric = cache(next_token_accuracy)
