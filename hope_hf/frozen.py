"""Reading with frozen memories, and a mixture with live ones that bounds what live memories lose on a new text."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

from .model.cache_hope import HopeCache

# Tokens of a prompt that are read at a time: bounds the memory that logits take.
_PIECE = 1024


def _without_peft(model: nn.Module) -> PreTrainedModel:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def memory_mixers(model: PreTrainedModel) -> dict[int, nn.Module]:
    """The mixers of a HOPE that write memories through gates, by layer."""
    blocks = _without_peft(model).base_model.layers
    return {layer: block.mixer for layer, block in enumerate(blocks) if hasattr(block.mixer, "gates")}


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
    """Losses [..., T] in nats of a mixture of readings, from the losses [..., T] of each; float64.

    Each reading has the likelihood that it gave to the tokens before as its weight, all the same at first. Then the
    likelihood of a text is the mean of theirs, so that any number of tokens cost at most the logarithm of the number
    of readings more than by the best reading: 0.69 nats in all for two.
    """
    totals = torch.stack([losses.double().cumsum(-1) for losses in readings])
    mixed = math.log(len(totals)) - (-totals).logsumexp(0)
    return mixed.diff(prepend=torch.zeros_like(mixed[..., :1]))


class FrozenMixture(LogitsProcessor):
    """`generate(..., logits_processor=[FrozenMixture(model)])`: live and frozen memories predict together.

    The weights are those of `mixed_losses`, over prompt and new tokens, so a text that is unlike those of the training
    is continued at most 0.69 nats (in all) worse than with the better of the two. The prompt is read twice more, and
    every new token once more. One object serves one call of `generate`, greedy or sampled, on whole texts (no cache of
    what was read before) without padding.

    Args:
        model: the HOPE that generates; ValueError if it has no memories.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import FrozenMixture, HopeConfig, HopeForCausalLM
    >>> model = HopeForCausalLM(HopeConfig(vocab_size=50, hidden_size=64, num_hidden_layers=2)).eval()
    >>> text = torch.arange(1, 20)[None]
    >>> model.generate(text, max_new_tokens=3, logits_processor=[FrozenMixture(model)]).shape
    torch.Size([1, 22])

    ```
    """

    def __init__(self, model: PreTrainedModel):
        if not getattr(model.config, "has_memories", False):
            raise ValueError("FrozenMixture needs a HOPE with memories: this model has none to freeze.")
        self.model = model
        self.cache = HopeCache(model.config)
        # tokens that both readings have seen [B, T], their log-likelihoods under live and frozen memories [2, B], and
        # the log-probabilities of the next token [2, B, vocab_size]
        self.seen = self.likelihoods = self.predicted = None

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Log-probabilities [B, vocab_size] of the mixture, from the logits of live memories."""
        if self.seen is None:
            live = self._prompt(input_ids, HopeCache(self.model.config))
            with frozen_memories(self.model):
                self.likelihoods = torch.stack([live, self._prompt(input_ids, self.cache)])
        elif not torch.equal(input_ids[:, :-1], self.seen):
            raise ValueError("FrozenMixture follows one text a row: use it for one call of generate, without beams.")
        else:
            self.likelihoods += self.predicted.gather(-1, input_ids[None, :, -1:].expand(2, -1, 1)).squeeze(-1)
        self.seen = input_ids
        with frozen_memories(self.model):
            frozen = self._read(input_ids[:, -1:], self.cache)[:, -1]
        self.predicted = torch.stack([scores, frozen.to(scores.device)]).float().log_softmax(-1)
        weights = self.likelihoods.log_softmax(0)
        return (self.predicted + weights.unsqueeze(-1)).logsumexp(0)

    def _read(self, input_ids: Tensor, cache: HopeCache) -> Tensor:
        return self.model(input_ids=input_ids, cache=cache).logits

    def _prompt(self, input_ids: Tensor, cache: HopeCache) -> Tensor:
        """Log-likelihood [B] of all tokens but the first; the cache then has all but the last."""
        found = torch.zeros(len(input_ids), device=input_ids.device)
        for start in range(0, input_ids.shape[1] - 1, _PIECE):
            targets = input_ids[:, start + 1 : start + _PIECE + 1]
            logits = self._read(input_ids[:, start : start + targets.shape[1]], cache)
            found -= F.cross_entropy(logits.float().mT, targets.to(logits.device), reduction="none").sum(-1).to(found)
        return found
