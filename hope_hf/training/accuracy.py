"""The share of tokens that the model ranks first, as a metric of the library `evaluate`."""

from functools import cache

import torch
from torch import Tensor

from .objective import IGNORED


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


@cache
def _metric():
    """An own metric: `evaluate.load("accuracy")` would fetch code from the Hub."""
    # Slow to import.
    import evaluate
    from datasets import Features, Value

    class NextTokenAccuracy(evaluate.Metric):
        """Share of `predictions` that equal `references`, both int64 [n]."""

        def _info(self):
            return evaluate.MetricInfo(
                description="Share of tokens that the model ranks first.",
                citation="",
                features=Features({"predictions": Value("int64"), "references": Value("int64")}),
            )

        def _compute(self, predictions, references):
            return {"accuracy": float((torch.as_tensor(predictions) == torch.as_tensor(references)).double().mean())}

    # Its file in the cache would be shared with other processes.
    return NextTokenAccuracy(keep_in_memory=True)
