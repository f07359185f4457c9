"""Reading with frozen memories, and the bound on what live memories lose on a new text."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def _without_peft(model: nn.Module) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def memory_mixers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The mixers of a HOPE that write memories through gates, by layer."""
    mixers = {}
    for layer, block in enumerate(_without_peft(model).base_model.layers):
        if hasattr(block.mixer, "gates"):
            mixers[layer] = block.mixer
    return mixers


@contextmanager
def frozen_memories(model: PreTrainedModel) -> Iterator[None]:
    """Inside, all memories of a HOPE stay at their learned initial state: the control for their writes.

    It holds for the calls of this thread (or asynchronous task); other threads read with live memories. A call may
    also be frozen by its own argument, `model(text, freeze_memories=True)`, which `torch.compile(model)` needs.

    Raises:
        ValueError: the model is a compiled one, or its code is older than this context.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeConfig, HopeForCausalLM, frozen_memories
    >>> model = HopeForCausalLM(HopeConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2)).eval()
    >>> text = torch.arange(40)[None]
    >>> live = model(text).logits
    >>> with frozen_memories(model):
    ...     frozen = model(text).logits
    >>> torch.equal(live, frozen)
    False

    ```
    """

    plain = _without_peft(model)
    if hasattr(plain, "_orig_mod"):
        raise ValueError("frozen_memories cannot reach into torch.compile(model): call it with freeze_memories=True")
    if not hasattr(plain, "frozen_memories"):
        raise ValueError(
            f"{type(plain).__name__} cannot freeze memories: give a HOPE, whose code is not older than this package"
        )
    with plain.frozen_memories():
        yield


def mixed_losses(readings: Sequence[Tensor]) -> Tensor:
    """The losses of a mixture of readings of one text, for example with live and with frozen memories.

    Each reading has the likelihood that it gave to the tokens before as its weight, all the same at first. Then the
    likelihood of a text is the mean of theirs, so that any number of tokens cost at most the logarithm of the number
    of readings more than by the best reading: 0.69 nats in all for two.

    Args:
        readings: the losses of each reading, in nats a token [..., T].

    Returns:
        Losses in nats a token [..., T], float64.
    """
    totals = torch.stack(tuple(readings)).double().cumsum(-1)
    mixed = math.log(len(totals)) - (-totals).logsumexp(0)
    before_text = torch.zeros_like(mixed[..., :1])
    return mixed.diff(prepend=before_text)
