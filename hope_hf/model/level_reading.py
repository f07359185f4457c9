"""Reading a text piece by piece while the levels learn from it, see `level_learning.py` for the rule.

Axes: B row, T token of the call, L level.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from transformers import AutoTokenizer
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .cache_hope import HopeCache
from .inputs import check_inputs, check_labels, later_begins
from .level_learning import (
    LevelLearning,
    LevelState,
    MatrixKey,
    empty_state,
    learning_weights,
    step,
    weight_norms,
)
from .loss import IGNORED, HopeHead


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
            f"{100 * self.drift:.2f} %, {self.state_bytes / 1e6:.1f} MB learned"
        )


class Reading(NamedTuple):
    """The result of `read_and_learn`."""

    # after the last block and norm, of the call's kept columns [B, K, hidden_size]; `None` if none are kept
    hidden: torch.Tensor | None
    # summed loss of each row [B] in nats, and its number of predictions
    loss: torch.Tensor
    scored: torch.Tensor
    # the same of each piece, in the order of reading
    pieces: list[tuple[float, int]]


def check_learning(model: PreTrainedModel, cache, input_ids, attention_mask, position_ids) -> LevelLearning:
    """The model's `LevelLearning`; ValueError if it cannot learn from this call."""
    learning = model.config.level_learning
    if learning is None:
        raise ValueError(
            "learn=True needs `level_learning` in the configuration: set model.config.level_learning = "
            "LevelLearning(), or convert a model with python -m hope_hf.convert"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "learning needs gradients, which torch.inference_mode() excludes: use torch.no_grad() instead"
        )
    if not hasattr(cache, "levels"):
        raise ValueError(
            f"past_key_values is a {type(cache).__name__}, which cannot hold what levels learn: give a "
            "HopeCache(model.config)"
        )
    if input_ids is None:
        raise ValueError("learn=True predicts the next token: give input_ids, not inputs_embeds")
    numbers = attention_mask is not None and attention_mask.dtype != torch.bool and bool((attention_mask > 1).any())
    restarts = False
    if position_ids is not None:
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
        begins = later_begins(real, position_ids)
        if cache.get_seq_length():
            begins |= (position_ids == 0) & real.bool()
        restarts = bool(begins.any())
    if numbers or restarts:
        raise ValueError("learn=True reads one document a row: give every document a row of its own")
    learning.check(model.config)
    return learning.resolved(model.config)


def read_and_learn(
    model: PreTrainedModel,
    cache,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    labels: torch.Tensor | None = None,
    keeps_hidden: bool = True,
    second_order: bool = False,
    **kwargs,
) -> Reading:
    """Read a call's tokens piece by piece, and let the levels learn after each.

    Where gradients are enabled, as in training, losses and hidden states carry the graph through the effect of all
    deltas. Else everything is detached, and weights get no gradient.

    Args:
        model: a causal language model of this package.
        cache: a `HopeCache`, which is read and updated.
        input_ids: [B, T].
        attention_mask: [B, columns seen + T].
        position_ids: [B, T].
        labels: [B, T], the tokens themselves; a token with -100 is neither scored nor learned from.
        second_order: whether gradients also go through the steps.
        kwargs: other arguments of the trunk.
    """
    learning = check_learning(model, cache, input_ids, attention_mask, position_ids)
    weights = learning_weights(model, learning)
    learner = _Learner(model, learning, weight_norms(weights), second_order)
    if cache.levels is not None and cache.levels.deltas.keys() != weights.keys():
        raise ValueError(
            f"past_key_values holds what the matrices {', '.join(map(str, cache.levels.deltas))} have learned, and "
            "`level_learning` names others: set the fields back, or call cache.reset_levels()"
        )
    rows, length = input_ids.shape
    seen = cache.get_seq_length()
    real = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        real = attention_mask[:, -length:].bool()
    if labels is None:
        labels = input_ids.masked_fill(~real, -100)
    targets = pad(labels[:, 1:], (0, 1), value=-100).masked_fill(~real, -100)
    before = cache.snapshot()
    try:
        if cache.levels is None:
            cache.levels = empty_state(weights, len(learning.periods), rows)
        cuts = _cuts(cache.levels.tokens, real, learning.periods[0])
        groups = {cut: [row for row in range(rows) if cuts[row] == cut] for cut in cuts}
        # Rows whose pieces end at different columns are read one after the other, so that each is cut as if alone.
        parts = [cache] if len(groups) == 1 else [cache.select(chosen) for chosen in groups.values()]
        results = []
        for part, (stops, chosen) in zip(parts, groups.items(), strict=True):
            read = []
            for start, stop in zip((0, *stops), stops, strict=False):
                columns = slice(start, stop)
                inputs = {"input_ids": input_ids[chosen, columns], **kwargs}
                if attention_mask is not None:
                    inputs["attention_mask"] = attention_mask[chosen, : seen + stop]
                if position_ids is not None:
                    inputs["position_ids"] = position_ids.expand(rows, -1)[chosen, columns]
                piece = _Piece(inputs, targets[chosen, columns], real[chosen, columns])
                hidden, *sums = _read(learner, part, piece)
                read.append((hidden if keeps_hidden else None, *sums))
            results.append(read)
        order = torch.tensor([row for chosen in groups.values() for row in chosen]).argsort().to(input_ids.device)
        if len(parts) > 1:
            cache.join(parts, order)
    except BaseException:
        cache.rollback(before)
        raise
    joined = [torch.cat([torch.stack([one[at] for one in read]).sum(0) for read in results])[order] for at in (1, 2)]
    hidden = None
    if keeps_hidden:
        hidden = torch.cat([torch.cat([one[0] for one in read], dim=1) for read in results])[order]
    pieces = [(float(one[1].detach().sum()), int(one[2].sum())) for read in results for one in read]
    return Reading(hidden, *joined, pieces)


def _cuts(tokens: torch.Tensor, real: torch.Tensor, period: int) -> list[tuple[int, ...]]:
    """For each row the columns at which its pieces end, the call's end included."""
    length = real.shape[1]
    counts = tokens[:, None].to(real.device) + real.cumsum(1)
    ends = (counts % period == 0) & real
    return [(*(column + 1 for column in row.nonzero()[:, 0].tolist() if column + 1 < length), length) for row in ends]


@contextmanager
def _weights_without_gradients(model: nn.Module) -> Iterator[None]:
    """No graph below the first level that learns, and none for the weights."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


class _Piece(NamedTuple):
    """Tokens that are read with the same levels."""

    # arguments of the trunk
    inputs: dict
    # each token's next token [B, T], -100 where it is not scored
    targets: torch.Tensor
    # whether a token is no padding [B, T]
    real: torch.Tensor


class _Learner(NamedTuple):
    """A model, and how it learns."""

    model: PreTrainedModel
    learning: LevelLearning
    norms: dict[MatrixKey, torch.Tensor]
    # whether gradients also go through the steps
    second_order: bool


def _read(learner: _Learner, cache, piece: _Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of a piece, and each row's summed loss and number of predictions; the cache is updated."""
    if torch.is_grad_enabled():
        return _read_with_graph(learner, cache, piece, keeps_graph=True)
    with _weights_without_gradients(learner.model), torch.enable_grad():
        hidden, losses, scored = _read_with_graph(learner, cache, piece, keeps_graph=False)
    cache.detach_()
    return hidden.detach(), losses.detach(), scored


def _read_with_graph(learner: _Learner, cache, piece: _Piece, keeps_graph: bool):
    """The result of `_read`. `keeps_graph`: whether a backward pass follows."""
    model, second_order = learner.model, learner.second_order
    state = cache.levels
    # tensors of this piece alone, so that its gradient does not go on through states that earlier pieces left
    deltas = {
        key: delta.view_as(delta) if delta.requires_grad else delta.detach().requires_grad_()
        for key, delta in state.deltas.items()
    }
    cache.levels = state._replace(deltas=deltas)
    hidden = model.base_model(**piece.inputs, past_key_values=cache).last_hidden_state
    inside = _row_losses(model, hidden[:, :-1], piece.targets[:, :-1])
    # The last token's prediction is scored, not learned from: its target belongs to the next piece.
    with torch.set_grad_enabled(keeps_graph):
        losses = inside + _row_losses(model, hidden[:, -1:], piece.targets[:, -1:])
    learned, scored = (piece.targets[:, :-1] != -100).sum(1), (piece.targets != -100).sum(1)
    gradients = {}
    if bool(learned.any()):
        found = torch.autograd.grad(
            inside.sum(), [*deltas.values()], retain_graph=keeps_graph, create_graph=second_order
        )
        gradients = dict(zip(deltas, found, strict=True))
    with torch.set_grad_enabled(second_order):
        cache.levels = _after_piece(learner, state, gradients, inside.detach(), learned, piece.real)
    return hidden, losses, scored


def _row_losses(model, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Summed next-token loss of each row [B] of hidden states [B, T, hidden_size], float32 or wider."""
    if not hidden.shape[1]:
        return hidden.new_zeros(len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32))
    return torch.stack([model.summed_loss(*row) for row in zip(hidden, targets, strict=True)])


def _after_piece(learner: _Learner, state: LevelState, gradients, loss, learned, real) -> LevelState:
    """The state after a piece: the gradient added to every open period, and a step for every one that it closes."""
    learning, device = learner.learning, state.tokens.device
    tokens = state.tokens + real.sum(1).to(device)
    losses = state.losses + loss[:, None].to(state.losses)
    scored = state.scored + learned[:, None].to(device)
    periods = torch.tensor(learning.periods, device=device)
    # a piece of padding alone closes no period
    closes = (tokens[:, None] % periods == 0) & real.any(1)[:, None].to(device)
    sums = dict(state.gradients)
    for key, gradient in gradients.items():
        gradient = gradient.to(state.deltas[key].dtype)
        sums[key] = sums[key] + gradient if key in sums else gradient
    mean = losses / scored
    guess = math.log(learner.model.config.vocab_size)
    finite = mean.isfinite()
    for key, gradient in sums.items():
        # the norm is not finite if an entry is not
        finite[:, key.level] &= torch.linalg.vector_norm(gradient.detach(), dim=(1, 2)).isfinite().to(device)
    gated = mean > guess if learning.gate else torch.zeros_like(finite)
    has_loss = closes & (scored > 0)
    steps = has_loss & finite & ~gated
    strength = (mean / (learning.brake * guess)).clamp(max=1.0) if learning.brake else torch.ones_like(mean)
    strength = torch.where(steps, strength, 0.0)
    deltas = dict(state.deltas)
    for key, norm in learner.norms.items():
        level = key.level
        if bool(steps[:, level].any()):
            size = strength[:, level].to(norm.device)[:, None, None]
            deltas[key] = step(deltas[key], sums[key], norm, learning, size)
        if bool(closes[:, level].all()):
            sums.pop(key, None)
        elif key in sums and bool(closes[:, level].any()):
            is_open = ~closes[:, level].to(norm.device)
            sums[key] = torch.where(is_open[:, None, None], sums[key], 0.0)
    reasons = torch.stack([has_loss & finite & gated, has_loss & ~finite], dim=-1)
    return LevelState(
        deltas,
        sums,
        tokens,
        torch.where(closes, 0.0, losses),
        torch.where(closes, 0, scored),
        state.steps + steps,
        state.skipped + reasons,
    )


def drifts_of(model: PreTrainedModel, state: LevelState) -> torch.Tensor:
    """Largest norm of a difference of each row and level [B, L], relative to that of its matrix."""
    norms = weight_norms(learning_weights(model, model.config.level_learning.resolved(model.config)))
    return state.drifts(norms)


def report_of(reading: Reading, before: LevelState | None, after: LevelState, model, tokens: int) -> LearningReport:
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
        drift=float(drifts_of(model, after).max()),
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
        cache = HopeCache(self.config) if cache is None else cache
        reading = read_and_learn(
            self, cache, input_ids, attention_mask, position_ids, labels, kept is not None, **kwargs
        )
        loss = None
        if labels is not None:
            loss = reading.loss.sum() / (reading.scored.sum() if num_items_in_batch is None else num_items_in_batch)
        logits = None if kept is None else self.lm_head(reading.hidden[:, kept])
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)

    def summed_loss(self, hidden_states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Summed loss in nats of the tokens [...] that follow hidden states [..., hidden_size]; -100 is not scored."""
        if type(self.lm_head) is HopeHead and self.tp_size is None:
            return self.lm_head(hidden_states, targets)
        logits = self.lm_head(hidden_states)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return cross_entropy(logits.to(wide).flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")

    @torch.no_grad()
    def level_drifts(self, past_key_values: HopeCache) -> torch.Tensor:
        """Largest norm of what each row's levels have learned [B, L], relative to that of the matrix."""
        return drifts_of(self, past_key_values.levels)

    def drift(self, past_key_values: HopeCache) -> float:
        """The largest of `level_drifts`; 0.0 before the levels learn."""
        return 0.0 if past_key_values.levels is None else float(self.level_drifts(past_key_values).max())

    @torch.no_grad()
    def learn(
        self,
        text: torch.Tensor | str,
        past_key_values: Cache | None = None,
        attention_mask: torch.Tensor | None = None,
        tokenizer=None,
    ) -> LearningReport:
        """Read a text and let the levels learn from it; the cache keeps what they learned.

        Args:
            text: tokens [B, T], or a string, which is split by the model's tokenizer.
            past_key_values: a `HopeCache`, which is read and updated.
            attention_mask: [B, columns seen + T], 0 for padding.
            tokenizer: for a string; unless given, loaded from the folder or repository of the model.

        Raises:
            ValueError: the model or the cache cannot learn, or the arguments do not fit.
        """
        if past_key_values is None:
            raise ValueError("what a text teaches is kept in a cache: give past_key_values=HopeCache(model.config)")
        if isinstance(text, str):
            tokenizer = tokenizer or AutoTokenizer.from_pretrained(self.config._name_or_path)
            begins = not past_key_values.get_seq_length()
            text = tokenizer(text, return_tensors="pt", add_special_tokens=begins).input_ids.to(self.device)
        check_inputs(self.config, text)
        before = getattr(past_key_values, "levels", None)
        reading = read_and_learn(self, past_key_values, text, attention_mask, keeps_hidden=False)
        tokens = text.numel() if attention_mask is None else int(attention_mask[:, -text.shape[1] :].sum())
        return report_of(reading, before, past_key_values.levels, self, tokens)
