"""The suite `continual`: segments of a stream, read by the checkpoints of a run, or learned in use by one model.

In use the model learns the first half of each segment, one after the other, in three ways: levels learn, the context
grows, and fine-tuning. The second halves are tested before the first segment and after each.
"""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hope_hf import HopeCache
from hope_hf.data import bytes_per_id
from hope_hf.optim import build_optimizer

from ..checkpoints import Checkpoint, find_checkpoints
from ..display import small_curves
from ..flags import MODEL, TEXT, Arguments, suite
from ..result import CannotRun, Row, SuiteResult, summary_row
from ..streams import document_scores, mean_of_blocks
from ..subject import Subject, load_subject, require_finite
from .fine_tuning import BETAS, EPSILON, MAX_GRAD_NORM, WEIGHT_DECAY
from .in_context import read
from .segments import Measured, Segment, by_checkpoint, of_checkpoints, segment_opener, transfer

# Of fine-tuning, a usual one for a trained model.
LEARNING_RATE = 5e-5
LEVELS, CONTEXT, TUNING = "levels learn", "in context", "fine-tuning"


@suite(*MODEL, *TEXT, "segments", "learning_rate", "batch_size", over_checkpoints=True)
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
    halves = [_halves(segment, subject) for segment in segments]
    read_so_far = [0]
    for learned, _ in halves:
        read_so_far.append(read_so_far[-1] + sum(len(document) - 1 for document in learned))
    points = [Checkpoint("", step, tokens) for step, tokens in enumerate(read_so_far)]
    texts = [learned for learned, _ in halves]
    learning = [{"segment": segment.name} for segment in segments]
    states = {
        LEVELS: _levels(subject, texts, learning),
        CONTEXT: _context(subject, texts),
        TUNING: _fine_tuned(args, subject, texts),
    }
    longest = max(len(document) for _, tested in halves for document in tested) - 1
    if subject.longest_input and sum(len(one) for text in texts for one in text) + longest > subject.longest_input:
        del states[CONTEXT]
    rows, table, found = [], [], []
    for way, reached in states.items():
        losses = [
            [_losses(args, learner, cache, tested, f"continual: {way}, {segment.name}")
             for segment, (_, tested) in zip(segments, halves, strict=True)]
            for learner, cache in reached
        ]  # fmt: skip
        measured = [
            Measured(segment.name, torch.stack([after[index] for after in losses]), _bytes(subject, halves[index][1]))
            for index, segment in enumerate(segments)
        ]
        rows += [_with_change({"way": way, **row}, measured) for row in by_checkpoint(points, measured)]
        moved = transfer(points, measured)
        table += [{"way": way, **row} for row in moved]
        found.append(summary_row(f"{way}: loss after the last segment", moved[-1]["last"], None))
        found.append(summary_row(f"{way}: forgetting", moved[-1]["forgetting"], None))
    for row, text in zip(learning, texts, strict=True):
        scores = document_scores(args, subject, text, f"continual: levels as trained, {row['segment']}")
        row["loss_levels_as_trained"] = mean_of_blocks(torch.cat([one.losses for one in scores]))[0]
    tables = {
        "Loss of the second halves, forgetting and backward transfer, nats per token": table,
        "Levels that learn: loss of the first halves while they were read": learning,
        "Second halves after each segment (step: segments learned)": rows,
    }
    return SuiteResult(tables, {"continual.png": partial(draw, rows)}, summary=found)


def draw(rows: list[Row], path: Path):
    """For each segment, over the tokens learned, how each way changes the loss of its second half."""
    panels: dict[str, dict[str, list]] = {}
    for row in rows:
        ways = panels.setdefault(f"{row['segment']}: loss above that before learning, nats per token", {})
        ways.setdefault(row["way"], []).append((row["tokens"], (row["change"], row["change_stderr"])))
    small_curves(path, panels, "tokens learned")


def _with_change(row: Row, measured: list[Measured]) -> Row:
    """The row with the loss minus that before the first segment, paired by token."""
    (losses,) = (one.losses for one in measured if one.name == row["segment"])
    change, error = mean_of_blocks(losses[row["step"]] - losses[0])
    return row | {"change": change, "change_stderr": error}


def _halves(segment: Segment, subject: Subject) -> tuple[list[Tensor], list[Tensor]]:
    """The documents [T] of the first and of the second half of a segment's tokens, none longer than the positions."""
    most = (subject.longest_input or math.inf) - 1
    left, halves = sum(len(document) - 1 for document in segment.documents) // 2, ([], [])
    for document in segment.documents:
        ids = document[1:]
        for half, part in zip(halves, (ids[:left], ids[left:]), strict=True):
            pieces = part.split(int(min(most, max(len(part), 1)))) if len(part) else ()
            half += [torch.cat([document[:1], piece]) for piece in pieces]
        left = max(0, left - len(ids))
    if not all(halves):
        raise ValueError(f"--segments: {segment.name} has fewer than two tokens: give it more text.")
    return halves


def _levels(subject: Subject, texts: list[list[Tensor]], learning: list[Row]) -> Iterator[tuple[Subject, HopeCache]]:
    """A cache that has read nothing and holds what levels have learned, before the first segment and after each."""
    model, levels = subject.model, None
    yield subject, HopeCache(model.config)
    for row, text in zip(learning, texts, strict=True):
        reports = []
        for document in text:
            cache = HopeCache(model.config)
            cache.levels = levels
            reports.append(model.learn(document[None].to(model.device), cache=cache))
            levels = cache.levels
        weights = [len(document) - 1 for document in text]
        losses = [report.loss * weight for report, weight in zip(reports, weights, strict=True)]
        row |= {"n": sum(weights), "loss": math.fsum(losses) / sum(weights)}
        row["steps"] = sum(sum(report.steps) for report in reports)
        for name in ("skipped_gate", "skipped_not_finite"):
            row[name] = sum(getattr(report, name) for report in reports)
        row |= {"drift": reports[-1].drift, "state_mib": reports[-1].state_bytes / 2**20}
        cache = HopeCache(model.config)
        cache.levels = levels
        yield subject, cache


def _context(subject: Subject, texts: list[list[Tensor]]) -> Iterator[tuple[Subject, HopeCache]]:
    """A cache of all documents so far, each after its start token; levels stay as trained."""
    cache = HopeCache(subject.model.config)
    yield subject, cache
    for text in texts:
        cache = read(subject, torch.cat(text).tolist(), cache)
        yield subject, cache


def _fine_tuned(
    args: Arguments, subject: Subject, texts: list[list[Tensor]]
) -> Iterator[tuple[Subject, HopeCache | None]]:
    """A copy of the model in float32 or wider that takes a step on every piece of a period; no cache."""
    # a small step is lost in the rounding of bfloat16 weights
    model = copy.deepcopy(subject.model).to(torch.promote_types(subject.model.dtype, torch.float32))
    learner = replace(subject, model=model)
    period = model.config.level_learning.resolved(model.config).periods[0]
    rate = args.learning_rate or LEARNING_RATE
    optimizer = build_optimizer(model, "adamw", rate, WEIGHT_DECAY, BETAS, EPSILON, tokens_per_step=period)
    yield learner, None
    for text in texts:
        model.train()
        for piece in (piece for document in text for piece in document.split(period) if len(piece) > 1):
            ids = piece[None].to(model.device)
            loss = model(ids, labels=ids, use_cache=False).loss
            if not math.isfinite(loss.item()):
                raise CannotRun("continual: the loss of fine-tuning is not finite: lower --learning_rate.")
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            optimizer.step()
        model.eval()
        yield learner, None


def _losses(args: Arguments, subject: Subject, cache: HopeCache | None, documents: list[Tensor], name: str) -> Tensor:
    scores = document_scores(args, subject, documents, name, cache)
    losses = torch.cat([one.losses for one in scores])
    require_finite(losses, f"{name}: the losses")
    return losses


def _bytes(subject: Subject, documents: list[Tensor]) -> int:
    table = torch.tensor(bytes_per_id(subject.tokenizer))
    return max(1, sum(int(table[document[1:]].sum()) for document in documents))
