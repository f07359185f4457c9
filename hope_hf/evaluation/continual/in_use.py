"""The suite `continual`: segments of a stream, read by the checkpoints of a run, or learned in use by one model.

In use the model learns the first half of each segment, one after the other, in three ways: levels learn, the context
grows, and fine-tuning. The second halves are tested before the first segment and after each.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from hope_hf import HopeCache
from hope_hf.common.flags import LONGEST
from hope_hf.data import bytes_per_id
from hope_hf.optim import build_optimizer

from ..checkpoints import Checkpoint, find_checkpoints
from ..display import small_curves
from ..flags import Arguments
from ..result import Number, Row, SuiteResult, put, summary_row
from ..streams import document_losses, mean_of_blocks
from ..subject import Subject, load_subject, require_finite
from .fine_tuning import BETAS, EPSILON, WEIGHT_DECAY, descend
from .in_context import read
from .segments import (
    Measured,
    Segment,
    by_checkpoint,
    measured_segments,
    num_scored,
    of_checkpoints,
    segment_opener,
    transfer,
)

# Of fine-tuning, a usual one for a trained model.
LEARNING_RATE = 5e-5
LEVELS = "levels learn"
CONTEXT = "in context"
TUNING = "fine-tuning"
# A model and a cache that every tested document is read after.
State = tuple[Subject, HopeCache | None]


def continual(args: Arguments, subject=None) -> SuiteResult:
    """Segments by each checkpoint of a run (`of_checkpoints`), or learned in use by one model (`learn_in_use`).

    The suite loads the models itself. Raises ValueError for one checkpoint, and one model whose levels cannot learn.
    """
    open_segments = segment_opener(args)
    checkpoints = find_checkpoints(args)
    if len(checkpoints) > 1:
        return of_checkpoints(args, checkpoints, open_segments)
    if not checkpoints:
        subject = load_subject(args)
        if subject.learns:
            return learn_in_use(args, subject, open_segments(subject))
    raise ValueError(
        "--suite continual needs two checkpoints or more: name a pattern, such as --model_name_or_path "
        "'runs/x/checkpoint-*', or one model whose config.json has level_learning."
    )


def learn_in_use(args: Arguments, subject: Subject, segments: list[Segment]) -> SuiteResult:
    """Loss of every segment's second half after each segment's first half, forgetting and backward transfer.

    Ways: `levels learn` (documents one by one; what levels learn is a state that goes on, the context does not), `in
    context` (all documents in one context, levels as trained; left out if the model has too few positions), and
    `fine-tuning` of a copy (one step of AdamW on every piece). Raises ValueError if a loss is not finite.
    """
    learned = []
    tested = []
    learning = []
    points = [Checkpoint("", step=0, tokens=0)]
    for step, segment in enumerate(segments, start=1):
        first_half, second_half = _halves(segment, subject)
        learned.append(first_half)
        tested.append(_tested(subject, segment, second_half))
        learning.append({"segment": segment.name})
        tokens = points[-1].tokens + num_scored(first_half)
        points.append(Checkpoint("", step, tokens))
    ways = {LEVELS: _levels(subject, learned, learning)}
    if _fits_a_context(subject, learned, tested):
        ways[CONTEXT] = _context(subject, learned)
    ways[TUNING] = _fine_tuned(args, subject, learned)
    rows = []
    table = []
    summary = []
    for way, states in ways.items():
        losses = []
        for learner, cache in states:
            losses.append([_losses(args, learner, cache, half, way) for half in tested])
        measured = measured_segments(tested, losses)
        for row in by_checkpoint(points, measured):
            rows.append(_with_change({"way": way, **row}, measured))
        transfers = transfer(points, measured)
        table += [{"way": way, **row} for row in transfers]
        mean = transfers[-1]
        summary.append(summary_row(f"{way}: loss after the last segment", mean["last"], None))
        summary.append(summary_row(f"{way}: forgetting", mean["forgetting"], None))
    for row, documents in zip(learning, learned, strict=True):
        losses = document_losses(args, subject, documents, f"continual: levels as trained, {row['segment']}")
        row["loss_levels_as_trained"], _ = mean_of_blocks(losses)
    tables = {
        "Loss of the second halves, forgetting and backward transfer, nats per token": table,
        "Levels that learn: loss of the first halves while they were read": learning,
        "Second halves after each segment (step: segments learned)": rows,
    }
    return SuiteResult(tables, {"continual.png": partial(draw, rows)}, summary=summary)


def _tested(subject: Subject, segment: Segment, documents: list[Tensor]) -> Segment:
    """The second half of a segment; its bytes are those of its tokens."""
    table = torch.tensor(bytes_per_id(subject.tokenizer))
    num_bytes = sum(int(table[document[1:]].sum()) for document in documents)
    return Segment(segment.name, documents, max(1, num_bytes))


def _fits_a_context(subject: Subject, learned: list[list[Tensor]], tested: list[Segment]) -> bool:
    """Whether the positions suffice for all documents that are learned, and a tested one after them."""
    if subject.longest_input is None:
        return True
    in_context = sum(map(len, chain.from_iterable(learned)))
    longest = 0
    for segment in tested:
        longest = max(longest, *map(len, segment.documents))
    return in_context + longest - 1 <= subject.longest_input


def draw(rows: list[Row], path: Path):
    """For each segment, over the tokens learned, how each way changes the loss of its second half."""
    panels = {}
    for row in rows:
        title = f"{row['segment']}: loss above that before learning, nats per token"
        points = panels.setdefault(title, {}).setdefault(row["way"], [])
        change = Number(row["change"], row["change_stderr"])
        points.append((row["tokens"], change))
    small_curves(path, panels, "tokens learned")


def _with_change(row: Row, measured: list[Measured]) -> Row:
    """The row with the loss minus that before the first segment, paired by token."""
    (losses,) = (segment.losses for segment in measured if segment.name == row["segment"])
    put(row, "change", mean_of_blocks(losses[row["step"]] - losses[0]))
    return row


def _halves(segment: Segment, subject: Subject) -> tuple[list[Tensor], list[Tensor]]:
    """The documents [T] of the first and of the second half of a segment's tokens, none longer than the positions."""
    longest = (subject.longest_input or LONGEST) - 1
    left = segment.num_tokens // 2
    first_half = []
    second_half = []
    for document in segment.documents:
        start, ids = document[:1], document[1:]
        first_half += _documents(start, ids[:left], longest)
        second_half += _documents(start, ids[left:], longest)
        left = max(0, left - len(ids))
    if not first_half or not second_half:
        raise ValueError(f"--segments: {segment.name} has fewer than two tokens: give it more text.")
    return first_half, second_half


def _documents(start: Tensor, ids: Tensor, longest: int) -> list[Tensor]:
    """Tokens [T] as documents of at most `longest` tokens behind the start token [1]; none for no tokens."""
    if len(ids) == 0:
        return []
    return [torch.cat([start, part]) for part in ids.split(longest)]


def _levels(subject: Subject, texts: list[list[Tensor]], learning: list[Row]) -> Iterator[State]:
    """A cache that has read nothing and holds what levels have learned, before the first segment and after each.

    Adds to each row of `learning` what happened in its segment.
    """
    model = subject.model
    cache = HopeCache(model.config)
    yield subject, cache
    for row, documents in zip(learning, texts, strict=True):
        row |= {"n": num_scored(documents), "loss": 0.0, "steps": 0, "skipped_gate": 0, "skipped_not_finite": 0}
        losses = []
        for document in documents:
            report = model.learn(document[None].to(model.device), cache=cache)
            losses.append(report.loss * (len(document) - 1))
            row["steps"] += sum(report.steps)
            row["skipped_gate"] += report.skipped_gate
            row["skipped_not_finite"] += report.skipped_not_finite
            levels = cache.levels
            # The context does not go on.
            cache = HopeCache(model.config)
            cache.levels = levels
        row["loss"] = math.fsum(losses) / row["n"]
        row["drift"] = report.drift
        row["state_mib"] = report.state_bytes / 2**20
        yield subject, cache


def _context(subject: Subject, texts: list[list[Tensor]]) -> Iterator[State]:
    """A cache of all documents so far, each after its start token; levels stay as trained."""
    cache = HopeCache(subject.model.config)
    yield subject, cache
    for documents in texts:
        cache = read(subject, torch.cat(documents).tolist(), cache)
        yield subject, cache


def _fine_tuned(args: Arguments, subject: Subject, texts: list[list[Tensor]]) -> Iterator[State]:
    """A copy of the model in float32 or wider that takes a step on every piece of a period; no cache."""
    # a small step is lost in the rounding of bfloat16 weights
    dtype = torch.promote_types(subject.model.dtype, torch.float32)
    model = copy.deepcopy(subject.model).to(dtype)
    learner = replace(subject, model=model)
    period = model.config.level_learning.resolved(model.config).periods[0]
    rate = args.learning_rate or LEARNING_RATE
    optimizer = build_optimizer(model, "adamw", rate, WEIGHT_DECAY, BETAS, EPSILON, tokens_per_step=period)
    yield learner, None
    for documents in texts:
        model.train()
        for document in documents:
            for piece in document.split(period):
                if len(piece) > 1:
                    ids = piece[None].to(model.device)
                    loss = model(ids, labels=ids, use_cache=False).loss
                    descend(model, optimizer, loss, "continual")
        model.eval()
        yield learner, None


def _losses(args: Arguments, subject: Subject, cache: HopeCache | None, segment: Segment, way: str) -> Tensor:
    """The losses [T] of a segment's documents, each read after the cache."""
    name = f"continual: {way}, {segment.name}"
    losses = document_losses(args, subject, segment.documents, name, cache)
    require_finite(losses, f"{name}: the losses")
    return losses
