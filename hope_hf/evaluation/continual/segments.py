"""Segments of a stream: the loss of each under every checkpoint of a run, forgetting and backward transfer."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from hope_hf.data import Corpus, Needed, passing, read_mixture

from ..checkpoints import Checkpoint
from ..display import small_curves
from ..flags import Arguments
from ..held_out import held_out_documents
from ..result import UNKNOWN, Number, Row, SuiteResult, put, summary_row
from ..streams import bits_per_byte, document_losses, mean_of_blocks
from ..subject import Subject, load_subject, require_finite


@dataclass(frozen=True)
class Segment:
    """A text as documents [T] of token ids, each after a start token, and the number of scored bytes."""

    name: str
    documents: list[Tensor]
    num_bytes: int

    @property
    def num_tokens(self) -> int:
        """The number of scored tokens."""
        return num_scored(self.documents)


def num_scored(documents: list[Tensor]) -> int:
    """The number of tokens of documents [T] without their start tokens."""
    return sum(len(document) - 1 for document in documents)


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

        return partial(_open_corpora, args.segments, corpora)
    if not args.dataset_mixture and not args.train_shards:
        raise ValueError(
            "--suite continual needs --segments: name a file with a corpus for each segment, or the run's "
            "--dataset_mixture or --train_shards."
        )
    held_out = held_out_documents(args)
    texts: dict[str, list[str]] = {}
    for text, corpus in zip(held_out.texts, held_out.corpora, strict=True):
        texts.setdefault(corpus, []).append(text)
    _require_several(held_out.source, len(texts))
    return partial(_encoded, texts)


def _open_corpora(path: str, corpora: list[Corpus], subject: Subject) -> list[Segment]:
    return [open_segment(path, corpus, subject) for corpus in corpora]


def _encoded(texts: dict[str, list[str]], subject: Subject) -> list[Segment]:
    """A segment for the texts of each corpus."""
    return [_segment(name, texts_of_corpus, subject) for name, texts_of_corpus in texts.items()]


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
    texts = rows.select(range(corpus.max_documents or len(rows)))["text"]
    segment = _segment(corpus.name, texts, subject, corpus.max_tokens)
    read = segment.num_tokens
    if corpus.max_tokens is not None and read < corpus.max_tokens:
        raise ValueError(
            f"{where} {corpus.name} has {read:,} tokens, fewer than max_tokens {corpus.max_tokens:,}: lower it."
        )
    return segment


def cut(subject: Subject, text: str, tokens: float) -> str:
    """The text of the first tokens. Encoding it again may split its end differently."""
    if tokens == math.inf:
        return text
    options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
    ends = subject.tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"]
    if len(ends) <= tokens:
        return text
    _, end = ends[tokens - 1]
    return text[:end]


def _segment(name: str, texts: Iterable[str], subject: Subject, most: int | None = None) -> Segment:
    """The texts one by one, until they have `most` tokens."""
    documents = []
    num_bytes = 0
    left = math.inf if most is None else most
    for text in texts:
        part = cut(subject, text, left)
        ids = subject.encode(part)
        if ids:
            documents.append(torch.tensor([subject.start, *ids]))
            num_bytes += len(part.encode("utf-8"))
        left -= len(ids)
        if left <= 0:
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
    measured = measured_segments(segments, losses)
    rows = by_checkpoint(checkpoints, measured)
    # Bits per byte of all segments, by step.
    bits = {}
    for row in rows:
        checkpoint_of_row = {"step": row["step"], "tokens": row["tokens"]}
        bits.setdefault(row["step"], checkpoint_of_row)[row["segment"]] = row["bits_per_byte"]
    transfers = transfer(checkpoints, measured)
    tables = {
        "Bits per byte": list(bits.values()),
        "Loss, forgetting and backward transfer, nats per token": transfers,
        "Segments by checkpoint": rows,
    }
    mean = transfers[-1]
    summary = [
        summary_row("loss of the last checkpoint", mean["last"], None, math.log(first.model.config.vocab_size)),
        summary_row("forgetting", mean["forgetting"], None),
    ]
    return SuiteResult(tables, {"continual.png": partial(draw, rows)}, summary=summary)


def measured_segments(segments: list[Segment], losses: list[list[Tensor]]) -> list[Measured]:
    """The segments with their losses: [T] of every segment, by checkpoint."""
    measured = []
    for segment, *losses_of_segment in zip(segments, *losses, strict=True):
        measured.append(Measured(segment.name, torch.stack(losses_of_segment), segment.num_bytes))
    return measured


def by_checkpoint(checkpoints: list[Checkpoint], measured: list[Measured]) -> list[Row]:
    """A row for every checkpoint and segment; no forgetting at the first checkpoint."""
    rows = []
    for index, checkpoint in enumerate(checkpoints):
        for segment in measured:
            count = segment.losses.shape[1]
            loss, stderr = mean_of_blocks(segment.losses[index])
            row = {
                "step": checkpoint.step,
                "tokens": checkpoint.tokens,
                "segment": segment.name,
                "n": count,
                "loss": loss,
                "loss_stderr": stderr,
                **bits_per_byte(loss, stderr, count / segment.num_bytes),
            }
            put(row, "forgetting", forgetting(segment, index) if index else UNKNOWN)
            rows.append(row)
    return rows


def forgetting(segment: Measured, index: int) -> Number:
    """Loss of a checkpoint minus that of the best earlier one, and the standard error, paired by token."""
    earlier = segment.losses[:index].double()
    best = int(earlier.mean(1).argmin())
    return mean_of_blocks(segment.losses[index] - segment.losses[best])


def transfer(checkpoints: list[Checkpoint], measured: list[Measured]) -> list[Row]:
    """A row for every segment and one for their means; no transfer of segments that the last checkpoint ends."""
    last = len(checkpoints) - 1
    rows = []
    for index, segment in enumerate(measured):
        end = _end_of_share(checkpoints, Fraction(index + 1, len(measured)))
        means = segment.losses.double().mean(1)
        best = int(means[:-1].argmin())
        row = {
            "segment": segment.name,
            "first": float(means[0]),
            "best_earlier": float(means[best]),
            "best_step": f"{checkpoints[best].step:,}",
            "last": float(means[-1]),
        }
        put(row, "forgetting", forgetting(segment, last))
        row["ends_at"] = f"{checkpoints[end].step:,}"
        gain = UNKNOWN
        # Of a segment that the last checkpoint ends it would be 0 by construction.
        if end < last:
            gain = mean_of_blocks(segment.losses[end] - segment.losses[-1])
        put(row, "backward_transfer", gain)
        rows.append(row)
    rows.append(_means(rows))
    return rows


def _end_of_share(checkpoints: list[Checkpoint], share: Fraction) -> int:
    """The number of the first checkpoint at or after the end of a share of the stream."""
    steps = [checkpoint.step for checkpoint in checkpoints]
    return bisect_left(steps, steps[-1] * share)


def _means(rows: list[Row]) -> Row:
    """The row of the segments' means."""
    means: Row = dict.fromkeys(rows[0]) | {"segment": "mean", "best_step": "", "ends_at": ""}
    for name in ("first", "best_earlier", "last", "forgetting", "backward_transfer"):
        known = [row[name] for row in rows if row[name] is not None]
        if known:
            means[name] = sum(known) / len(known)
    return means


def draw(rows: list[Row], path: Path):
    """Bits per byte and forgetting of each segment over tokens, or over steps if tokens are not known."""
    unit = "step" if any(row["tokens"] is None for row in rows) else "tokens"
    columns = {"bits per byte": "bits_per_byte", "forgetting, nats per token": "forgetting"}
    panels = {}
    for title, name in columns.items():
        curves = {}
        for row in rows:
            if row[name] is not None:
                number = Number(row[name], row[f"{name}_stderr"])
                curves.setdefault(row["segment"], []).append((row[unit], number))
        panels[title] = curves
    small_curves(path, panels, unit)


def _losses(args: Arguments, checkpoint: Checkpoint, segments: list[Segment]) -> list[Tensor]:
    """The losses [T] of every segment by a checkpoint."""
    subject = load_subject(replace(args, model_name_or_path=checkpoint.path))
    all_losses = []
    for segment in segments:
        name = f"continual: {Path(checkpoint.path).name}, {segment.name}"
        losses = document_losses(args, subject, segment.documents, name)
        require_finite(losses, f"continual: the losses of {checkpoint.path} on {segment.name}")
        all_losses.append(losses)
    return all_losses
