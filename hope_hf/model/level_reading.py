"""Reading a text piece by piece while the levels learn from it, see `level_learning.py` for the rule and a piece.

Axes: B row, T token of the call, L level.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoTokenizer
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .cache_hope import CACHE_NAME, HopeCache, takes_cache
from .cache_parts import LevelState
from .calls import check_inputs, check_labels
from .documents import boundaries_of, later_begins
from .level_learning import Learner, LevelLearning, Piece, PieceResult, read_piece
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
        parts = [f"read {self.tokens} tokens at {self.loss:.4f} nats per token"]
        parts.append(f"{sum(self.steps)} steps")
        if self.skipped_gate:
            parts.append(f"{self.skipped_gate} steps left out (by the gate)")
        if self.skipped_not_finite:
            parts.append(f"{self.skipped_not_finite} steps left out (not finite)")
        parts.append(f"drift {100 * self.drift:.2f} %")
        parts.append(f"{self.state_bytes / 1e6:.1f} MB held")
        return ", ".join(parts)


class Reading(NamedTuple):
    """The result of `read_and_learn`, detached."""

    # after the last block and norm [B, T, hidden_size]; `None` if it is not kept
    hidden: Tensor | None
    # summed loss of each row [B] in nats, and its number of predictions
    loss: Tensor
    scored: Tensor
    # the same of each piece, in the order of reading
    pieces: list[tuple[float, int]]


@dataclass
class Text:
    """The tokens of a call."""

    # [B, T]
    input_ids: Tensor
    # each token's next token, -100 where it is not scored [B, T]
    targets: Tensor
    # whether a token is no padding [B, T]
    real: Tensor
    # whether a document begins with a token after another one of the row [B, T]
    begins: Tensor
    # [B, columns seen + T]; `None` without padding
    attention_mask: Tensor | None
    # [B, T]; `None`: tokens are counted
    position_ids: Tensor | None
    # other arguments of the trunk
    options: dict

    def row(self, index: int) -> "Text":
        """The text of one row."""
        tensors = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                tensors[name] = value[index : index + 1]
        return replace(self, **tensors)

    def inputs(self, start: int, stop: int) -> dict:
        """Arguments of the trunk for the columns from `start` to `stop`."""
        inputs = dict(self.options)
        inputs["input_ids"] = self.input_ids[:, start:stop]
        if self.attention_mask is not None:
            columns = self.attention_mask.shape[1]
            later = self.input_ids.shape[1] - stop
            inputs["attention_mask"] = self.attention_mask[:, : columns - later]
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids[:, start:stop]
        return inputs

    def piece_ends(self, tokens: Tensor, period: int) -> list[list[int]]:
        """For each row the columns at which its pieces end, the call's end included.

        A piece ends with the `period`th token of a document, padding not counted, and where a document begins.

        Args:
            tokens: number that each row's document has read before the call [B].
        """
        ends_of_rows = []
        length = self.input_ids.shape[1]
        for number, real, begins in zip(tokens.tolist(), self.real.tolist(), self.begins.tolist(), strict=True):
            ends = {length}
            for column in range(length):
                if begins[column]:
                    ends.add(column)
                    number = 0
                number += real[column]
                if real[column] and number % period == 0:
                    ends.add(column + 1)
            ends_of_rows.append(sorted(ends - {0}))
        return ends_of_rows


def check_learning(
    learning: LevelLearning | None,
    cache: Cache,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    options: Mapping,
) -> None:
    """ValueError if levels cannot learn from a call."""
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
    boundaries = list(boundaries_of(options))
    if attention_mask is not None and int(attention_mask.max()) > 1:
        boundaries.append("numbers in attention_mask")
    if boundaries:
        raise ValueError(
            f"learn=True takes documents of a row as position_ids that restart at 0, not as {' and '.join(boundaries)}"
        )


def text_of(
    model: PreTrainedModel,
    cache: HopeCache,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    labels: Tensor | None,
    options: dict,
) -> Text:
    """The tokens of a call, as `read_and_learn` takes them.

    Raises:
        ValueError: a row of several documents has padding.
    """
    length = input_ids.shape[1]
    real = torch.ones_like(input_ids, dtype=torch.bool)
    has_padding = False
    if attention_mask is not None:
        real = attention_mask[:, -length:].bool()
        has_padding = not bool((attention_mask == 1).all())
    begins = torch.zeros_like(real)
    if position_ids is not None:
        position_ids = position_ids.expand(input_ids.shape)
        begins = later_begins(real, position_ids)
        if cache.get_seq_length():
            begins |= (position_ids == 0) & real
        if has_padding and bool(begins.any()):
            raise ValueError("learn=True reads rows of several documents without padding: leave attention_mask out")
    elif attention_mask is not None and "mask" in model.config.needs:
        # as `generate` counts them: padding has no position
        positions = attention_mask.long().cumsum(1) - 1
        position_ids = positions.clamp(min=0)[:, -length:]
    if labels is None:
        labels = input_ids.masked_fill(~real, IGNORED)
    targets = next_labels(labels).masked_fill(~real, IGNORED)
    return Text(input_ids, targets, real, begins, attention_mask, position_ids, options)


@dataclass
class TextReader:
    """Reads texts whose rows have the same pieces, and lets the levels learn after each piece."""

    learner: Learner
    # whether readings have hidden states
    keeps_hidden: bool
    # whether the cache is read later; else the last piece teaches nothing
    keeps_cache: bool
    # called with the number of tokens, rows times columns, of every piece
    after_piece: Callable[[int], None] | None

    def read(self, text: Text, cache: HopeCache, ends: list[int]) -> Reading:
        """The reading of a text whose pieces end at these columns; the cache, a `HopeCache`, is updated."""
        results: list[PieceResult] = []
        for start, stop in pairwise([0, *ends]):
            piece = Piece(
                inputs=text.inputs(start, stop),
                targets=text.targets[:, start:stop],
                real=text.real[:, start:stop],
                begins_document=bool(text.begins[0, start]),
                teaches=self.keeps_cache or stop < ends[-1],
            )
            if piece.begins_document:
                cache.levels = self.learner.empty_state(rows=len(piece.real))
            result = read_piece(self.learner, cache, piece)
            results.append(result if self.keeps_hidden else result._replace(hidden=None))
            if self.after_piece is not None:
                self.after_piece(piece.real.numel())
        return _reading_of_pieces(results)

    def read_rows(self, text: Text, cache: HopeCache, ends_of_rows: list[list[int]]) -> Reading:
        """The reading of rows whose pieces end at other columns than each other's: one row after the other."""
        caches = []
        readings = []
        for row, ends in enumerate(ends_of_rows):
            cache_of_row = cache.select([row])
            readings.append(self.read(text.row(row), cache_of_row, ends))
            caches.append(cache_of_row)
        cache.join(caches)
        return _reading_of_rows(readings)


def _reading_of_pieces(results: list[PieceResult]) -> Reading:
    """What the pieces of a text add up to."""
    hidden, losses, scored = zip(*results, strict=True)
    pieces = []
    for result in results:
        loss = float(result.loss.sum())
        predictions = int(result.scored.sum())
        pieces.append((loss, predictions))
    return Reading(
        hidden=None if hidden[0] is None else torch.cat(hidden, dim=1),
        loss=torch.stack(losses).sum(0),
        scored=torch.stack(scored).sum(0),
        pieces=pieces,
    )


def _reading_of_rows(readings: list[Reading]) -> Reading:
    """The reading of all rows, from those of each."""
    hidden, losses, scored, pieces = zip(*readings, strict=True)
    return Reading(
        hidden=None if hidden[0] is None else torch.cat(hidden),
        loss=torch.cat(losses),
        scored=torch.cat(scored),
        pieces=list(chain.from_iterable(pieces)),
    )


def read_and_learn(
    model: PreTrainedModel,
    cache: HopeCache,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    labels: Tensor | None = None,
    keeps_hidden: bool = True,
    keeps_cache: bool = True,
    learning: LevelLearning | None = None,
    after_piece: Callable[[int], None] | None = None,
    **kwargs,
) -> Reading:
    """Read a call's tokens piece by piece, and let the levels learn after each.

    Rows with the same pieces are read together, others one after the other, so that each is read as if alone. A
    document begins a piece, and is read without what was learned before.

    Args:
        model: a causal language model of this package.
        cache: a `HopeCache`, which is read and updated; after an error it is as before.
        input_ids: [B, T].
        attention_mask: [B, columns seen + T].
        position_ids: [B, T].
        labels: [B, T], the tokens themselves; a token with -100 is neither scored nor learned from.
        keeps_hidden: whether the result has hidden states.
        keeps_cache: whether the cache is read later; else the last piece teaches nothing.
        learning: how levels learn, unless as the model's configuration says.
        after_piece: called with the number of tokens, rows times columns, that were read since the last call.
        kwargs: other arguments of the trunk.

    Raises:
        ValueError: the model or the cache cannot learn from such a call.
    """
    learning = learning or model.config.level_learning
    check_learning(learning, cache, input_ids, attention_mask, kwargs)
    learning.check(model.config)
    learner = Learner.of(model, learning)
    if cache.levels is not None and cache.levels.deltas.keys() != learner.weights.keys():
        raise ValueError(
            f"the cache holds what the matrices {', '.join(map(str, cache.levels.deltas))} have learned, and "
            "`level_learning` names others: set the fields back, or call cache.reset_levels()"
        )
    text = text_of(model, cache, input_ids, attention_mask, position_ids, labels, kwargs)
    reader = TextReader(learner, keeps_hidden, keeps_cache, after_piece)
    before = cache.snapshot()
    try:
        if cache.levels is None:
            cache.levels = learner.empty_state(rows=len(input_ids))
        ends_of_rows = text.piece_ends(cache.levels.tokens, learner.learning.periods[0])
        first_ends = ends_of_rows[0]
        has_same_begins = bool((text.begins == text.begins[:1]).all())
        if has_same_begins and ends_of_rows == [first_ends] * len(ends_of_rows):
            return reader.read(text, cache, first_ends)
        return reader.read_rows(text, cache, ends_of_rows)
    except BaseException:
        cache.rollback(before)
        raise


def report_of(
    reading: Reading, before: LevelState | None, after: LevelState, drift: float, tokens: int
) -> LearningReport:
    """What a call has taught; `before` is the state before it."""
    counts = after.counts
    if before is not None:
        for name, count in before.counts.items():
            counts[name] = counts[name] - count
    scored = int(reading.scored.sum())
    loss = float(reading.loss.sum()) / scored if scored else math.nan
    losses = []
    for piece_loss, piece_scored in reading.pieces:
        if piece_scored:
            losses.append(piece_loss / piece_scored)
    return LearningReport(
        tokens=tokens,
        loss=loss,
        losses=losses,
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
        self,
        cache: HopeCache | None,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor | None,
        labels: Tensor | None,
        columns_with_logits: slice | Tensor | None,
        inputs_embeds: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        return_dict: bool = True,
        **kwargs,
    ) -> CausalLMOutputWithPast:
        """The result of `forward` for tokens [B, T] that the levels learn from."""
        for option in ("output_hidden_states", "output_attentions"):
            if kwargs.pop(option, None):
                raise ValueError(f"learn=True reads a text in pieces and returns no {option[7:]}: leave {option} out")
        if kwargs.pop("shift_labels", None) is not None:
            raise ValueError("learn=True shifts the labels itself: give the tokens as labels, without shift_labels")
        check_inputs(self.config, input_ids, inputs_embeds)
        if labels is not None:
            check_labels(labels, self.config.vocab_size)
        keeps_cache = cache is not None or use_cache is not False
        if cache is None:
            cache = HopeCache(self.config)
        reading = read_and_learn(
            self,
            cache,
            input_ids,
            attention_mask,
            position_ids,
            labels,
            keeps_hidden=columns_with_logits is not None,
            keeps_cache=keeps_cache,
            **kwargs,
        )
        loss = logits = None
        if labels is not None:
            predictions = reading.scored.sum() if num_items_in_batch is None else num_items_in_batch
            loss = reading.loss.sum() / predictions
        if columns_with_logits is not None:
            with torch.no_grad():
                logits = self.lm_head(reading.hidden[:, columns_with_logits])
        return CausalLMOutputWithPast(loss=loss, logits=logits, **{CACHE_NAME: cache})

    def summed_loss(self, hidden_states: Tensor, targets: Tensor, head_learns: bool = True) -> Tensor:
        """Summed loss in nats of the tokens [...] that follow hidden states [..., hidden_size]; -100 is not scored.

        Unless `head_learns`, gradients for the head are not needed.
        """
        if isinstance(self.lm_head, HopeHead) and self.tp_size is None:
            return self.lm_head(hidden_states, targets, head_learns)
        return summed_cross_entropy(self.lm_head(hidden_states), targets)

    @takes_cache
    @torch.no_grad()
    def level_drifts(self, cache: HopeCache) -> Tensor:
        """Largest norm of what each row's levels have learned [B, L], relative to that of the matrix."""
        if cache.levels is None:
            raise ValueError("the cache holds nothing that levels have learned: read a text with learn=True first")
        learning = self.config.level_learning
        if learning is None:
            raise ValueError(
                "the cache holds what levels have learned, and `level_learning` is None: set the field back"
            )
        return cache.levels.drifts(Learner.of(self, learning).norms)

    @takes_cache
    def drift(self, cache: HopeCache) -> float:
        """The largest of `level_drifts`; 0.0 before the levels learn."""
        return 0.0 if cache.levels is None else float(self.level_drifts(cache).max())

    @takes_cache
    @torch.no_grad()
    def learn(
        self,
        text: Tensor | str,
        cache: Cache | None = None,
        attention_mask: Tensor | None = None,
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
        tokens = text.numel()
        if attention_mask is not None:
            length = text.shape[1]
            tokens = int(attention_mask[:, -length:].sum())
        return report_of(reading, before, cache.levels, self.drift(cache), tokens)


def learning_rate_search(
    model: PreTrainedModel,
    texts: Iterable[Tensor],
    rates: Iterable[float] = (0.0025, 0.01, 0.025, 0.1),
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
    >>> _ = torch.manual_seed(1)
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
    texts = list(texts)
    rates = list(rates)
    if not rates or not texts or min(map(len, texts)) < 2:
        raise ValueError("learning_rate_search needs rates, and texts of at least two tokens: give both.")
    fields = model.config.level_learning or LevelLearning()
    reference = fields if fields.rate else LevelLearning()
    ratio = reference.drift / reference.rate
    best = None
    least_loss = math.inf
    for rate in rates:
        drift = min(1.0, ratio * rate)
        learning = replace(fields, rate=rate, drift=drift)
        loss = _loss_while_learning(model, texts, learning)
        if best is None or loss < least_loss:
            best = learning
            least_loss = loss
    return best


@torch.no_grad()
def _loss_while_learning(model: PreTrainedModel, texts: list[Tensor], learning: LevelLearning) -> float:
    """Summed loss in nats of texts [T], each read from its start; infinity for a number that is not finite."""
    total = 0.0
    for text in texts:
        check_inputs(model.config, text[None])
        # `learning` is an argument, since other threads may learn with the configuration
        reading = read_and_learn(
            model, HopeCache(model.config), text[None], keeps_hidden=False, keeps_cache=False, learning=learning
        )
        total += float(reading.loss.sum())
    return total if math.isfinite(total) else math.inf
