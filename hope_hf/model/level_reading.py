"""Reading a text piece by piece while the levels learn from it, see `level_learning.py` for the rule.

Axes: B row, T token of the call, L level.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from transformers import AutoTokenizer
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .cache_hope import CACHE_NAME, HopeCache, takes_cache
from .calls import check_inputs, check_labels
from .documents import boundaries_of, later_begins
from .level_learning import (
    LevelLearning,
    LevelState,
    empty_state,
    learning_weights,
    rate_factors,
    weight_norms,
)
from .level_pieces import Learner, Piece, read_piece
from .loss import IGNORED, HopeHead, next_labels, summed_cross_entropy


@dataclass
class LearningReport:
    """What a text has taught, over all rows of a batch."""

    # tokens read
    tokens: int
    # mean next-token loss in nats, each token read before it was learned from; NaN without a prediction
    loss: float
    # the same of each piece
    losses: list[float]
    # steps that each level took
    steps: list[int]
    # periods without a step: the mean loss was above that of a uniform guess, or a number was not finite
    skipped_gate: int
    skipped_not_finite: int
    # largest norm of a difference after the text, relative to that of its matrix
    drift: float
    # size of what the cache has learned, all rows together
    state_bytes: int

    def __str__(self) -> str:
        skipped = {"by the gate": self.skipped_gate, "not finite": self.skipped_not_finite}
        told = "".join(f", {number} steps left out ({why})" for why, number in skipped.items() if number)
        return (
            f"read {self.tokens} tokens at {self.loss:.4f} nats per token, {sum(self.steps)} steps{told}, drift "
            f"{100 * self.drift:.2f} %, {self.state_bytes / 1e6:.1f} MB held"
        )


class Reading(NamedTuple):
    """The result of `read_and_learn`."""

    # after the last block and norm, of the call's kept columns [B, K, hidden_size]; `None` if none are kept
    hidden: torch.Tensor | None
    # summed loss of each row [B] in nats (where gradients are enabled of all rows [1]), and its number of predictions
    loss: torch.Tensor
    scored: torch.Tensor
    # the same of each piece, in the order of reading
    pieces: list[tuple[float, int]]


def check_learning(
    model: PreTrainedModel, cache, input_ids, attention_mask, arguments: Mapping, learning: LevelLearning | None = None
) -> LevelLearning:
    """`learning`, or else the model's, for its blocks; ValueError if it cannot learn from this call."""
    learning = learning or model.config.level_learning
    if learning is None:
        raise ValueError(
            "learn=True needs `level_learning` in the configuration: set model.config.level_learning = "
            "LevelLearning(), or convert a model with hope-hf convert"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "learning needs gradients, which torch.inference_mode() excludes: use torch.no_grad() instead"
        )
    if not hasattr(cache, "levels"):
        raise ValueError(
            f"the cache is a {type(cache).__name__}, which cannot hold what levels learn: give a "
            "HopeCache(model.config)"
        )
    if input_ids is None:
        raise ValueError("learn=True predicts the next token: give input_ids, not inputs_embeds")
    if attention_mask is not None and getattr(attention_mask, "ndim", 4) != 2:
        raise ValueError(
            f"attention_mask has the shape {tuple(attention_mask.shape)}, and learn=True takes (batch, tokens), with "
            "1 for a token and 0 for padding"
        )
    numbers = attention_mask is not None and attention_mask.dtype != torch.bool and bool((attention_mask > 1).any())
    if told := [*boundaries_of(arguments), *["numbers in attention_mask"] * numbers]:
        raise ValueError(
            f"learn=True takes documents of a row as position_ids that restart at 0, not as {' and '.join(told)}"
        )
    learning.check(model.config)
    return learning.resolved(model.config)


def later_documents(model: PreTrainedModel, cache, input_ids, attention_mask, position_ids) -> torch.Tensor | None:
    """Tokens [B, T] at which a document begins after another one of its row; `None` if there is none.

    Raises:
        ValueError: the model's layers do not keep the documents apart, piece by piece.
    """
    if position_ids is None:
        return None
    seen = cache.get_seq_length()
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
    begins = later_begins(real, position_ids.expand(input_ids.shape))
    if seen:
        begins |= (position_ids == 0) & real.bool()
    if not bool(begins.any()):
        return None
    if attention_mask is not None and not bool((attention_mask == 1).all()):
        raise ValueError("learn=True reads rows of several documents without padding: leave attention_mask out")
    needs_mask = "mask" in model.config.needs
    if needs_mask and (seen or model.config.keeps_state):
        where = "beside layers of other kinds" if model.config.keeps_state else "after a cache that has read tokens"
        raise ValueError(
            f"'full_attention' layers {where} do not keep documents of a row apart while levels learn: give every "
            "document a row of its own"
        )
    return begins


def read_and_learn(
    model: PreTrainedModel,
    cache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    keeps_hidden: bool = True,
    keeps_cache: bool = True,
    learning: LevelLearning | None = None,
    after_piece: Callable[[int], None] | None = None,
    **kwargs,
) -> Reading:
    """Read a call's tokens piece by piece, and let the levels learn after each.

    Where gradients are enabled, as in training, losses and hidden states carry the graph through the effect of all
    deltas, and of the steps' learned rates. Else everything is detached, and weights get no gradient.

    Pieces of a row of several documents end at the same columns as those of one document. A document that begins
    inside a piece is read without what the one before it taught, and the piece's step is that of the row's last
    document alone.

    Args:
        model: a causal language model of this package.
        cache: a `HopeCache`, which is read and updated.
        input_ids: [B, T].
        attention_mask: [B, columns seen + T].
        position_ids: [B, T].
        labels: [B, T], the tokens themselves; a token with -100 is neither scored nor learned from.
        keeps_cache: whether the cache is read later; else the last piece teaches nothing.
        learning: how levels learn, unless as the model's configuration says.
        after_piece: called with the number of tokens, rows times columns, that were read since the last call.
        kwargs: other arguments of the trunk.
    """
    learning = check_learning(model, cache, input_ids, attention_mask, kwargs, learning)
    trains = torch.is_grad_enabled()
    begins = later_documents(model, cache, input_ids, attention_mask, position_ids)
    weights = learning_weights(model, learning)
    norms, factors = weight_norms(weights), rate_factors(model, learning)
    if cache.levels is not None and cache.levels.deltas.keys() != weights.keys():
        raise ValueError(
            f"the cache holds what the matrices {', '.join(map(str, cache.levels.deltas))} have learned, and "
            "`level_learning` names others: set the fields back, or call cache.reset_levels()"
        )
    rows, length = input_ids.shape
    seen = cache.get_seq_length()
    real = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        real = attention_mask[:, -length:].bool()
    if labels is None:
        labels = input_ids.masked_fill(~real, IGNORED)
    targets = next_labels(labels).masked_fill(~real, IGNORED)
    if position_ids is None and attention_mask is not None and "mask" in model.config.needs:
        # as `generate` counts them: padding has no position
        position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:]
    if begins is not None and "mask" in model.config.needs:
        number = begins.cumsum(1)
        attention_mask = (number[:, :, None] == number[:, None]).tril()[:, None]
    needs_hidden = keeps_hidden or trains

    def piece_of(chosen: list[int], start: int, stop: int) -> Piece:
        """The tokens of these rows and columns."""
        cut = chosen, slice(start, stop)
        inputs = {"input_ids": input_ids[cut], **kwargs}
        if attention_mask is not None:
            mask = attention_mask[chosen]
            inputs["attention_mask"] = mask[:, : seen + stop] if mask.ndim == 2 else mask[..., start:stop, :stop]
        if position_ids is not None:
            inputs["position_ids"] = position_ids.expand(rows, -1)[cut]
        later = None if begins is None else begins[cut]
        return Piece(inputs, targets[cut], real[cut], later, teaches=keeps_cache or stop < length)

    before = cache.snapshot()
    try:
        is_new = cache.levels is None
        if is_new:
            cache.levels = empty_state(weights, len(learning.periods), rows)
        cuts = _cuts(cache.levels.tokens, real, learning.periods[0])
        groups = {cut: [row for row in range(rows) if cuts[row] == cut] for cut in cuts}
        # Rows whose pieces end at different columns are read one after the other, so that each is cut as if alone.
        parts = [cache] if len(groups) == 1 else [cache.select(chosen) for chosen in groups.values()]
        results = []
        for part, (stops, chosen) in zip(parts, groups.items(), strict=True):
            # what an earlier call taught counts as a constant
            derivatives = {} if is_new else {key: torch.zeros_like(part.levels.deltas[key]) for key in factors}
            learner = Learner(model, learning, norms, factors, derivatives)
            read = []
            for start, stop in pairwise((0, *stops)):
                hidden, *sums = read_piece(learner, part, piece_of(chosen, start, stop))
                read.append((hidden if needs_hidden else None, *sums))
                if after_piece is not None:
                    after_piece(len(chosen) * (stop - start))
            results.append(read)
        order = torch.tensor([row for chosen in groups.values() for row in chosen]).argsort().to(input_ids.device)
        if len(parts) > 1:
            cache.join(parts, order)
    except BaseException:
        cache.rollback(before)
        raise
    loss, scored = (
        torch.cat([torch.stack([one[at] for one in read]).sum(0) for read in results])[order] for at in (1, 2)
    )
    pieces = [(float(one[1].detach().sum()), int(one[2].sum())) for read in results for one in read]
    hidden = None
    if needs_hidden:
        hidden = torch.cat([torch.cat([one[0] for one in read], dim=1) for read in results])[order]
    if trains:
        # one call for the whole text, so that the weight of the head has one gradient
        loss = model.summed_loss(hidden, targets)[None]
    return Reading(hidden, loss, scored, pieces)


def _cuts(tokens: torch.Tensor, real: torch.Tensor, period: int) -> list[tuple[int, ...]]:
    """For each row the columns at which its pieces end, the call's end included."""
    length = real.shape[1]
    counts = tokens[:, None].to(real.device) + real.cumsum(1)
    ends = (counts % period == 0) & real
    return [(*(column + 1 for column in row.nonzero()[:, 0].tolist() if column + 1 < length), length) for row in ends]


def report_of(
    reading: Reading, before: LevelState | None, after: LevelState, drift: float, tokens: int
) -> LearningReport:
    """What a call has taught; `before` is the state before it."""
    counts = after.counts
    if before is not None:
        counts = {name: number - before.counts[name] for name, number in counts.items()}
    total, scored = float(reading.loss.sum()), int(reading.scored.sum())
    return LearningReport(
        tokens=tokens,
        loss=total / scored if scored else math.nan,
        losses=[loss / count for loss, count in reading.pieces if count],
        steps=counts["steps"].sum(0).tolist(),
        skipped_gate=int(counts["skipped_gate"].sum()),
        skipped_not_finite=int(counts["skipped_not_finite"].sum()),
        drift=drift,
        state_bytes=after.nbytes,
    )


class LearnsFromText:
    """Causal language models whose levels learn while they read."""

    @torch.compiler.disable(reason="pieces and steps depend on the text")
    def _learn(
        self, cache, input_ids, attention_mask, position_ids, labels, kept,
        inputs_embeds=None, num_items_in_batch=None, use_cache=None, return_dict=True, **kwargs,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """The result of `forward` for tokens that the levels learn from; `kept` indexes the columns with logits."""
        for option in ("output_hidden_states", "output_attentions"):
            if kwargs.pop(option, None):
                raise ValueError(f"learn=True reads a text in pieces and returns no {option[7:]}: leave {option} out")
        check_inputs(self.config, input_ids, inputs_embeds)
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
        is_given = cache is not None
        cache = cache if is_given else HopeCache(self.config)
        reading = read_and_learn(
            self, cache, input_ids, attention_mask, position_ids, labels, kept is not None,
            keeps_cache=is_given or use_cache is not False, **kwargs,
        )  # fmt: skip
        loss = None
        if labels is not None:
            loss = reading.loss.sum() / (reading.scored.sum() if num_items_in_batch is None else num_items_in_batch)
        logits = None if kept is None else self.lm_head(reading.hidden[:, kept])
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: cache})

    def summed_loss(
        self, hidden_states: torch.Tensor, targets: torch.Tensor, head_learns: bool = True
    ) -> torch.Tensor:
        """Summed loss in nats of the tokens [...] that follow hidden states [..., hidden_size]; -100 is not scored.

        Unless `head_learns`, gradients for the head are not needed.
        """
        if type(self.lm_head) is HopeHead and self.tp_size is None:
            return self.lm_head(hidden_states, targets, head_learns)
        return summed_cross_entropy(self.lm_head(hidden_states), targets)

    @takes_cache
    @torch.no_grad()
    def level_drifts(self, cache: HopeCache) -> torch.Tensor:
        """Largest norm of what each row's levels have learned [B, L], relative to that of the matrix."""
        if cache.levels is None:
            raise ValueError("the cache holds nothing that levels have learned: read a text with learn=True first")
        learning = self.config.level_learning
        if learning is None:
            raise ValueError(
                "the cache holds what levels have learned, and `level_learning` is None: set the field back"
            )
        return cache.levels.drifts(weight_norms(learning_weights(self, learning.resolved(self.config))))

    @takes_cache
    def drift(self, cache: HopeCache) -> float:
        """The largest of `level_drifts`; 0.0 before the levels learn."""
        return 0.0 if cache.levels is None else float(self.level_drifts(cache).max())

    @takes_cache
    @torch.no_grad()
    def learn(
        self,
        text: torch.Tensor | str,
        cache: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        tokenizer=None,
        progress: bool = False,
    ) -> LearningReport:
        """Read a text and let the levels learn from it; the cache keeps what they learned.

        Args:
            text: tokens [B, T], or a string, which is split by the model's tokenizer.
            cache: a `HopeCache`, which is read and updated.
            attention_mask: [B, columns seen + T], 0 for padding.
            tokenizer: for a string; unless given, loaded from the folder or repository of the model.
            progress: whether a bar shows how many tokens are read.

        Raises:
            ValueError: the model or the cache cannot learn, or the arguments do not fit.
        """
        if cache is None:
            raise ValueError("what a text teaches is kept in a cache: give cache=HopeCache(model.config)")
        if isinstance(text, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(self.config._name_or_path)
            begins = not cache.get_seq_length()
            # Special tokens that a text spells are text, as in training.
            options = {"add_special_tokens": begins, "split_special_tokens": True}
            text = tokenizer(text, return_tensors="pt", **options).input_ids.to(self.device)
        check_inputs(self.config, text)
        before = getattr(cache, "levels", None)
        with logging.tqdm(total=text.numel(), desc="learn", unit="token", disable=not progress) as bar:
            reading = read_and_learn(self, cache, text, attention_mask, keeps_hidden=False, after_piece=bar.update)
        tokens = text.numel() if attention_mask is None else int(attention_mask[:, -text.shape[1] :].sum())
        return report_of(reading, before, cache.levels, self.drift(cache), tokens)


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
    fields = model.config.level_learning or LevelLearning()
    of_ratio = fields if fields.rate else LevelLearning()
    ratio = of_ratio.drift / of_ratio.rate
    tried = [replace(fields, rate=rate, drift=min(1.0, ratio * rate)) for rate in rates]

    @torch.no_grad()
    def loss(one: LevelLearning) -> float:
        total = 0.0
        for text in texts:
            check_inputs(model.config, text[None])
            # an argument, since other threads may learn with the configuration
            reading = read_and_learn(
                model, HopeCache(model.config), text[None], keeps_hidden=False, keeps_cache=False, learning=one
            )
            total += float(reading.loss.sum())
        return total if math.isfinite(total) else math.inf

    return min(tried, key=loss)
