"""The rate at which the levels of a model learn best from texts: a trained model's is no guide for a small one."""

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from transformers.modeling_utils import PreTrainedModel

from .cache_hope import HopeCache
from .level_learning import LevelLearning


def learning_rate_search(
    model: PreTrainedModel, texts: Iterable[torch.Tensor], rates: Iterable[float] = (0.0025, 0.01, 0.025, 0.1)
) -> LevelLearning:
    """The model's `level_learning` with that rate whose levels predict the texts best while they read them.

    The drift keeps its ratio to the rate (that of the defaults if the rate is 0), since a tight bound would hide a
    larger rate. Each text is read once for each rate, from its start; the model stays as it is.

    Args:
        model: a HOPE. Without `level_learning` in its configuration, `LevelLearning()` is searched.
        texts: tokens [T] of held-out texts, each of several periods.
        rates: values of `LevelLearning.rate`; 0 stands for levels that do not learn.

    Raises:
        ValueError: there is no rate, no text, or a text of one token.

    Example:

    ```python
    >>> import torch
    >>> from hope_hf import HopeConfig, HopeForCausalLM, LevelLearning, learning_rate_search
    >>> fields = LevelLearning(periods=[16])
    >>> config = HopeConfig(
    ...     vocab_size=50, hidden_size=64, num_hidden_layers=2, level_periods=[16], level_learning=fields
    ... )
    >>> model = HopeForCausalLM(config).eval()
    >>> model.config.level_learning = learning_rate_search(model, [torch.arange(50).repeat(4)], rates=[0.01, 0.02])
    >>> model.config.level_learning.rate
    0.02

    ```
    """
    texts, rates = list(texts), list(rates)
    if not rates or not texts or min(map(len, texts)) < 2:
        raise ValueError("learning_rate_search needs rates, and texts of at least two tokens: give both.")
    before = model.config.level_learning
    fields = before or LevelLearning()
    of_ratio = fields if fields.rate else LevelLearning()
    ratio = of_ratio.drift / of_ratio.rate
    tried = [replace(fields, rate=rate, drift=min(1.0, ratio * rate)) for rate in rates]

    def loss(one: LevelLearning) -> float:
        model.config.level_learning = one
        reports = [model.learn(text[None], past_key_values=HopeCache(model.config)) for text in texts]
        total = sum(report.loss * (report.tokens - 1) for report in reports)
        return total if math.isfinite(total) else math.inf

    try:
        return min(tried, key=loss)
    finally:
        model.config.level_learning = before
