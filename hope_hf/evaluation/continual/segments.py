"""Segments of a stream: the loss of each under every checkpoint of a run, forgetting and backward transfer."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hope_hf.data import Corpus, Needed, passing, read_mixture

from ..checkpoints import Checkpoint
from ..display import small_curves
from ..flags import Arguments
from ..held_out import held_out_documents
from ..result import Number, Row, SuiteResult, summary_row
from ..streams import bits_per_byte, document_scores, mean_of_blocks
from ..subject import Subject, load_subject, require_finite


@dataclass(frozen=True)
class Segment:
    """A text as documents [T] of token ids, each after a start token, and the number of scored bytes."""

    name: str
    documents: list[Tensor]
    num_bytes: int


def segment_opener(args: Arguments) -> Callable[[Subject], list[Segment]]:
    """A function that reads the segments with a tokenizer: those of `--segments`, or the held-out text of each corpus.

    Raises ValueError if no flag names segments, they cannot be read, or there are fewer than two.
    """
    if args.segments is not None:
        corpora = read_mixture(args.segments, "--segments")
        _require_several(f"--segments {args.segments}", len(corpora))
        for corpus in corpora:
            if corpus.shards:
                raise ValueError(
                    f"--segments {args.segments}, corpus {corpus.name}, has shards: name its text with files."
                )
        return lambda subject: [open_segment(args.segments, corpus, subject) for corpus in corpora]
    if not args.dataset_mixture and not args.train_shards:
        raise ValueError(
            "--suite continual needs --segments: name a file with a corpus for each segment, or the run's "
            "--dataset_mixture or --train_shards."
        )
    held, parts = held_out_documents(args), {}
    for text, corpus in zip(held.texts, held.corpora, strict=True):
        parts.setdefault(corpus, []).append(text)
    _require_several(held.source, len(parts))
    return lambda subject: [_segment(name, texts, subject) for name, texts in parts.items()]


def open_segment(path: str, corpus: Corpus, subject: Subject) -> Segment:
    """Read a segment up to its max_documents and max_tokens, from its beginning.

    Raises ValueError if the text is shorter than a limit.
    """
    where = f"--segments {path}, corpus"
    needed = Needed(documents=corpus.max_documents, tokens=corpus.max_tokens)
    rows, _ = passing(corpus, where, needed, subject.tokenizer)
    if corpus.max_documents is not None and corpus.max_documents > len(rows):
        raise ValueError(
            f"{where} {corpus.name} has {len(rows)} documents, fewer than max_documents {corpus.max_documents}: "
            "lower it."
        )
    texts = (row["text"] for row in rows.select(range(corpus.max_documents or len(rows))))
    segment = _segment(corpus.name, texts, subject, corpus.max_tokens)
    read = sum(len(document) - 1 for document in segment.documents)
    if corpus.max_tokens is not None and read < corpus.max_tokens:
        raise ValueError(
            f"{where} {corpus.name} has {read:,} tokens, fewer than max_tokens {corpus.max_tokens:,}: lower it."
        )
    return segment


def cut(subject: Subject, text: str, tokens: int) -> str:
    """The text of the first tokens. Encoding it again may split its end differently."""
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ends = subject.tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"]
    return text if len(ends) <= tokens else text[: ends[tokens - 1][1]]


def _segment(name: str, texts: Iterable[str], subject: Subject, most: int | None = None) -> Segment:
    """The texts one by one, until they have `most` tokens."""
    documents, num_bytes, left = [], 0, most
    for text in texts:
        part = text if left is None else cut(subject, text, left)
        ids = subject.encode(part)
        if ids:
            documents.append(torch.tensor([subject.start, *ids]))
            num_bytes += len(part.encode("utf-8"))
        if left is not None and (left := left - len(ids)) <= 0:
            break
    return Segment(name, documents, num_bytes)


def _require_several(source: str, count: int) -> None:
    if count < 2:
        raise ValueError(f"{source} has one segment: forgetting needs two or more.")


@dataclass(frozen=True)
class Measured:
    """Losses of all tokens of a segment by each checkpoint, [C, T] in nats, and its bytes."""

    name: str
    losses: Tensor
    num_bytes: int


def of_checkpoints(
    args: Arguments, checkpoints: list[Checkpoint], open_segments: Callable[[Subject], list[Segment]]
) -> SuiteResult:
    """Loss and bits per byte of every segment by each checkpoint of a run.

    forgetting: loss of a segment minus its lowest earlier loss. backward_transfer: how much the loss fell
    from the checkpoint that ended the segment to the last one, if a stream read the segments in their order for equal
    numbers of steps.
    """
    first = load_subject(replace(args, model_name_or_path=checkpoints[0].path))
    segments = open_segments(first)
    losses = [_losses(args, checkpoint, segments) for checkpoint in checkpoints]
    measured = [
        Measured(segment.name, torch.stack([row[index] for row in losses]), segment.num_bytes)
        for index, segment in enumerate(segments)
    ]
    rows = by_checkpoint(checkpoints, measured)
    bits = [
        {"step": one.step, "tokens": one.tokens}
        | {row["segment"]: row["bits_per_byte"] for row in rows if row["step"] == one.step}
        for one in checkpoints
    ]
    transfers = transfer(checkpoints, measured)
    tables = {
        "Bits per byte": bits,
        "Loss, forgetting and backward transfer, nats per token": transfers,
        "Segments by checkpoint": rows,
    }
    vocab_size, mean = first.model.config.vocab_size, transfers[-1]
    found = [
        summary_row("loss of the last checkpoint", mean["last"], None, math.log(vocab_size)),
        summary_row("forgetting", mean["forgetting"], None),
    ]
    return SuiteResult(tables, {"continual.png": partial(draw, rows)}, summary=found)


def by_checkpoint(checkpoints: list[Checkpoint], measured: list[Measured]) -> list[Row]:
    """A row for every checkpoint and segment; no forgetting at the first checkpoint."""
    rows = []
    for index, checkpoint in enumerate(checkpoints):
        for segment in measured:
            row = {"step": checkpoint.step, "tokens": checkpoint.tokens, "segment": segment.name}
            (loss, stderr), n = mean_of_blocks(segment.losses[index]), segment.losses.shape[1]
            row |= {"n": n, "loss": loss, "loss_stderr": stderr, **bits_per_byte(loss, stderr, n / segment.num_bytes)}
            gone, error = forgetting(segment, index) if index else (None, None)
            rows.append(row | {"forgetting": gone, "forgetting_stderr": error})
    return rows


def forgetting(segment: Measured, index: int) -> tuple[float, float | None]:
    """Loss of a checkpoint minus that of the best earlier one, and the standard error, paired by token."""
    best = int(segment.losses[:index].double().mean(1).argmin())
    return mean_of_blocks(segment.losses[index] - segment.losses[best])


def transfer(checkpoints: list[Checkpoint], measured: list[Measured]) -> list[Row]:
    """A row for every segment and one for their means; no transfer of segments that the last checkpoint ends."""
    last = checkpoints[-1].step
    rows = []
    for index, segment in enumerate(measured):
        # The first checkpoint after the segment's share of the stream.
        end = next(i for i, one in enumerate(checkpoints) if one.step * len(measured) >= last * (index + 1))
        # Of a segment that the last checkpoint ends it would be 0 by construction.
        is_last = end == len(checkpoints) - 1
        gain = (None, None) if is_last else mean_of_blocks(segment.losses[end] - segment.losses[-1])
        gone, error = forgetting(segment, len(checkpoints) - 1)
        means = segment.losses.double().mean(1)
        best = int(means[:-1].argmin())
        rows.append(
            {
                "segment": segment.name,
                "first": float(means[0]),
                "best_earlier": float(means[best]),
                "best_step": f"{checkpoints[best].step:,}",
                "last": float(means[-1]),
                "forgetting": gone,
                "forgetting_stderr": error,
                "ends_at": f"{checkpoints[end].step:,}",
                "backward_transfer": gain[0],
                "backward_transfer_stderr": gain[1],
            }
        )
    means: Row = dict.fromkeys(rows[0]) | {"segment": "mean", "best_step": "", "ends_at": ""}
    for name in ("first", "best_earlier", "last", "forgetting", "backward_transfer"):
        known = [row[name] for row in rows if row[name] is not None]
        means[name] = sum(known) / len(known) if known else None
    return [*rows, means]


def draw(rows: list[Row], path: Path):
    """Bits per byte and forgetting of each segment over tokens, or over steps if tokens are not known."""
    unit = "step" if any(row["tokens"] is None for row in rows) else "tokens"
    panels = {"bits per byte": {}, "forgetting: loss above the best earlier checkpoint": {}}
    for title, name in zip(panels, ("bits_per_byte", "forgetting"), strict=True):
        for row in rows:
            if row[name] is not None:
                point = (row[unit], Number(row[name], row[f"{name}_stderr"]))
                panels[title].setdefault(row["segment"], []).append(point)
    small_curves(path, panels, unit)


def _losses(args: Arguments, checkpoint: Checkpoint, segments: list[Segment]) -> list[Tensor]:
    subject = load_subject(replace(args, model_name_or_path=checkpoint.path))
    found = []
    for segment in segments:
        name = f"continual: {Path(checkpoint.path).name}, {segment.name}"
        losses = torch.cat([scores.losses for scores in document_scores(args, subject, segment.documents, name)])
        require_finite(losses, f"continual: the losses of {checkpoint.path} on {segment.name}")
        found.append(losses)
    return found
