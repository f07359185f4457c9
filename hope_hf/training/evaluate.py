"""Validation: loss, perplexity, accuracy and bits per byte, weighted by token over all processes."""

import math
from collections.abc import Callable
from functools import cache
from itertools import islice

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import Tensor

from hope_hf.common.objective import count_valid, loss_of_logits, model_inputs
from hope_hf.common.results import IGNORED, next_token_accuracy

from .process import sum_over_processes


@torch.no_grad()
def evaluate(
    model, data, accelerator: Accelerator, stopped: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Rows `eval/...` over `data.validation`. Each of W processes takes every W-th batch; `model` is wrapped.

    Bits per byte: loss in bits over the bytes of the scored text, comparable across tokenizers.

    Returns None once `stopped()` is true on any process: what was read so far is no evaluation.
    """
    was_training = model.training
    model.eval()
    loss_sum, right, tokens = 0.0, 0.0, 0
    batches = iter(data.validation)
    while group := list(islice(batches, accelerator.num_processes)):
        # A sharded forward pass communicates, so every process takes part to the end: a process without a batch left
        # uses one that does not count.
        counts = accelerator.process_index < len(group)
        if any(sum_over_processes(accelerator, stopped())):
            model.train(was_training)
            return None
        batch = group[accelerator.process_index if counts else 0]
        inputs = send_to_device(model_inputs(batch), accelerator.device)
        logits = model(**inputs, use_cache=False).logits
        if counts:
            loss_sum += float(loss_of_logits(logits, batch["labels"]))
            right += right_tokens(logits, batch["labels"])
            tokens += count_valid(batch["labels"])
    model.train(was_training)
    loss_sum, right, tokens = sum_over_processes(accelerator, loss_sum, right, tokens)
    if not tokens:
        raise ValueError(
            "The held-out text has no token to score, all its labels are masked: name another one (--validation_file)."
        )
    loss = loss_sum / tokens
    row = {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, 700.0)),
        "eval/accuracy": right / tokens,
        "eval/tokens": int(tokens),
    }
    if data.validation_bytes_per_token:
        row["eval/bits_per_byte"] = loss / math.log(2) / data.validation_bytes_per_token
    return row


@torch.no_grad()
def right_tokens(logits: Tensor, labels: Tensor) -> float:
    """Number of valid tokens to which the model gives the highest probability.

    logits [B, T, V]; labels [B, T] not shifted.
    """
    likeliest = logits[:, :-1].argmax(dim=-1)
    predictions = likeliest.cpu().flatten()
    references = labels[:, 1:].cpu().flatten()
    valid = references != IGNORED
    if not valid.any():
        return 0.0
    predictions = predictions[valid].numpy()
    accuracy = _metric().compute(predictions=predictions, references=references[valid].numpy())
    return accuracy["accuracy"] * int(valid.sum())


# One metric for all batches: creating it takes longer than using it.
_metric = cache(next_token_accuracy)
