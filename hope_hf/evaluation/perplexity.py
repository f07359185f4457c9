"""Loss and perplexity of a model on whole texts, and by position in long texts with controls."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hope_hf import frozen_memories
from hope_hf.common.results import next_token_accuracy
from hope_hf.data import bytes_per_id
from hope_hf.frozen import mixed_losses

from .display import curves, progress, small_curves
from .flags import MODEL, TEXT, Arguments, parse_lengths, suite
from .held_out import HeldOut, held_out_documents
from .levels import Piece, joined, learned_scores, level_panels, level_rows
from .result import TEXT_TABLE, Row, SuiteResult, summary_row
from .streams import (
    PIECE,
    Scores,
    bits_per_byte,
    carried_scores,
    document_scores,
    mean_of_blocks,
    memory_states,
    window_scores,
)
from .subject import Subject, require_finite

RESET_EVERY = 256
DEFAULT_LENGTHS = [256, 512, 1024, 2048, 4096, 8192]
CONTROLS = ("frozen", "window", f"reset_{RESET_EVERY}")
LONGEST_WINDOW = 2048
# Most tokens of each document with `--limit`.
LIMITED = 2048
LABELS = {
    "frozen": "memories frozen",
    f"reset_{RESET_EVERY}": f"reset every {RESET_EVERY}",
    "window": "sliding window",
    "loss": "carried",
    "levels_learn": "carried, levels learn",
}
# Name of the difference between the carried state without and with levels that learn.
LEARNED = "loss_minus_levels_learn"


@suite(*MODEL, *TEXT, "lengths", "samples_per_length", "limit", "batch_size")
def perplexity(args: Arguments, subject: Subject) -> SuiteResult:
    """Loss, perplexity and bits per byte of the held-out documents, and loss by position in the long ones.

    Every document follows one end-of-text token. By position: texts of the longest of `--lengths` tokens, read in one
    pass with the state carried (`loss`; left out for a text longer than the model's positions) and with controls:
    memories frozen at their initial state (`frozen`), a mixture of the two (`mixed`), a new state at every multiple of
    256 tokens (`reset_256`), and sliding windows with at least half a window of context (`window`: the second-largest
    length, at most 2,048 and the model's positions). Losses in nats per token; `x_minus_loss` is the gain of the
    carried state over the control x.
    A model with `level_learning` also reads the texts with levels that learn (`levels_learn`), and has a table of
    their steps. With `--limit` documents are cut at the longest of `--lengths` or 2,048 tokens.
    """
    held = held_out_documents(args).head(args.limit)
    ids = held.encoded(subject.encode)
    if args.limit:
        most = parse_lengths(args.lengths)[-1] if args.lengths else LIMITED
        ids = [row[:most] for row in ids]
        held = replace(held, texts=[subject.tokenizer.decode(row) for row in ids])
    documents = [torch.tensor([subject.start, *row]) for row in ids]
    whole, *parts = by_corpus(args, subject, held, documents)
    tables = {f"{TEXT_TABLE}{held.source}": [whole]} | ({"By corpus": parts} if parts else {})
    positions, learned = by_position(args, subject, documents)
    # The columns are split over two tables that fit a terminal.
    gains = [name for name in positions[0] if "_minus_" in name or name.startswith("state_")]
    tables["Loss by position"] = [{name: row[name] for name in row if name not in gains} for row in positions]
    if gains:
        rows = [{name: row[name] for name in ("positions", "n", *gains)} for row in positions]
        tables["Gain of the carried state over each control, and its size"] = rows
    pictures = {"loss_by_position.png": partial(draw, positions)}
    if learned:
        tables["Levels that learn, by position"] = learned.rows
        if learned.pieces:
            panels = level_panels(learned.pieces)
            pictures["levels.png"] = partial(small_curves, panels=panels, x_label="position in the text, tokens")
    return SuiteResult(tables, pictures, summary=_summary(whole, positions, subject.model.config.vocab_size))


def _summary(whole: Row, positions: list[Row], vocab_size: int) -> list[Row]:
    found = [
        summary_row("loss, nats per token", whole["loss"], whole["loss_stderr"], math.log(vocab_size)),
        summary_row("perplexity", whole["perplexity"], whole["perplexity_stderr"], vocab_size),
        summary_row("accuracy of the likeliest token", whole["accuracy"], whole["accuracy_stderr"], 1 / vocab_size),
    ]
    last = positions[-1]
    if "frozen_minus_loss" in last:
        name = f"loss saved by live memories, tokens {last['positions']}"
        found.append(summary_row(name, last["frozen_minus_loss"], last["frozen_minus_loss_stderr"], 0.0))
    if LEARNED in last:
        name = f"loss saved by levels that learn, tokens {last['positions']}"
        found.append(summary_row(name, last[LEARNED], last[f"{LEARNED}_stderr"], 0.0))
    return found


class Part(NamedTuple):
    """A document that was read."""

    corpus: str
    tokens: Tensor
    scores: Scores
    num_bytes: int


def by_corpus(args: Arguments, subject: Subject, held: HeldOut, documents: list[Tensor]) -> list[Row]:
    """A row for all documents, each read by itself from its beginning, and one for every corpus if there are several.

    Every token has the same weight.
    """
    found = document_scores(args, subject, documents, "perplexity: documents")
    require_finite(torch.cat([scores.losses for scores in found]), "perplexity: the model's losses on the text")
    sizes = [len(text.encode("utf-8")) for text in held.texts]
    tokens = [document[1:] for document in documents]
    parts = sorted(map(Part, held.corpora, tokens, found, sizes), key=lambda part: len(part.tokens))
    names = list(dict.fromkeys(held.corpora))
    of_corpus = {name: [part for part in parts if part.corpus == name] for name in names if len(names) > 1}
    return [_row(parts), *({"corpus": name, **_row(own)} for name, own in of_corpus.items())]


def _row(parts: list[Part]) -> Row:
    accuracy, hits = next_token_accuracy(), []
    for part in parts:
        accuracy.add_batch(predictions=part.scores.guesses.tolist(), references=part.tokens.tolist())
        hits.append(part.scores.guesses == part.tokens)
    losses = torch.cat([part.scores.losses for part in parts])
    loss, stderr = mean_of_blocks(losses)
    perplexity = math.exp(min(loss, 700.0))
    return {
        "documents": len(parts),
        "n": len(losses),
        "loss": loss,
        "loss_stderr": stderr,
        "perplexity": perplexity,
        "perplexity_stderr": stderr and perplexity * stderr,
        **bits_per_byte(loss, stderr, len(losses) / sum(part.num_bytes for part in parts)),
        **accuracy.compute(),
        "accuracy_stderr": mean_of_blocks(torch.cat(hits))[1],
    }


class Learned(NamedTuple):
    """What levels learned from the texts: rows by position and level, and the pieces that ended a period."""

    rows: list[Row]
    pieces: list[Piece]


def by_position(args: Arguments, subject: Subject, documents: list[Tensor]) -> tuple[list[Row], Learned | None]:
    """A row for every bucket of positions that ends at one of the lengths; bits per byte: those of the first mode.

    The second result is that of a model whose levels can learn, if the texts fit its positions.
    """
    edges = _edges(args, subject, documents)
    streams = _streams(documents, edges[-1], subject.start, args.texts_per_length)
    modes, learned, sizes = {}, None, []
    bound = subject.longest_input or math.inf
    if edges[-1] <= bound:
        modes["loss"], sizes = _carried(args, subject, streams, edges, "perplexity: by position")
        if subject.learns:
            modes["levels_learn"], learned = _learned(args, subject, streams, edges)
    if subject.has_memory:
        with frozen_memories(subject.model):
            modes["frozen"], _ = _carried(args, subject, streams, edges, "perplexity: by position, memories frozen")
    window = min(bound, LONGEST_WINDOW, edges[-2] if len(edges) > 1 else max(2, edges[0] // 2))
    modes["window"] = _windows(args, subject, streams, window, window // 2)
    if RESET_EVERY < bound:
        modes[f"reset_{RESET_EVERY}"] = _windows(args, subject, streams, RESET_EVERY + 1, RESET_EVERY)
    for name, losses in modes.items():
        require_finite(losses, f"perplexity: the model's losses on texts of {edges[-1]:,} tokens ({name})")
    mixed = mixed_losses([modes["loss"], modes["frozen"]]) if {"loss", "frozen"} <= modes.keys() else None
    table = torch.tensor(bytes_per_id(subject.tokenizer))
    rows = []
    for index, (start, end) in enumerate(pairwise([0, *edges])):
        num_bytes = int(table[streams[:, start + 1 : end + 1]].sum())
        row = {"positions": f"{start + 1:,}-{end:,}", "n": len(streams) * (end - start)}
        for name, losses in modes.items():
            row[name], row[f"{name}_stderr"] = mean_of_blocks(losses[:, start:end])
        if mixed is not None:
            row["mixed"] = float(mixed[:, start:end].mean())
        differences = {f"{name}_minus_loss": (name, "loss") for name in CONTROLS} | {LEARNED: ("loss", "levels_learn")}
        for called, (name, other) in differences.items():
            if {name, other} <= modes.keys():
                # Paired by token: the error is the standard error of the difference.
                gain = (modes[name] - modes[other])[:, start:end]
                row[called], row[f"{called}_stderr"] = mean_of_blocks(gain)
        first = next(iter(modes))
        row |= bits_per_byte(row[first], row[f"{first}_stderr"], row["n"] / max(1, num_bytes))
        if sizes:
            row |= sizes[index]
        rows.append(row)
    return rows, learned


def draw(rows: list[Row], path: Path):
    """Plot over the last position of each bucket: every mode's loss, and the gain of the carried state over each.

    A third panel has what levels that learn save.
    """
    ends = [int(row["positions"].split("-")[1].replace(",", "")) for row in rows]

    def series(suffix: str) -> dict[str, list]:
        named = {label: f"{name}{suffix}" for name, label in LABELS.items() if f"{name}{suffix}" in rows[0]}
        return {label: [(row[name], row[f"{name}_stderr"]) for row in rows] for label, name in named.items()}

    panels = {"loss, nats per token": series("")}
    if gains := series("_minus_loss"):
        panels["loss above that with the state carried, nats per token"] = gains
    if LEARNED in rows[0]:
        saved = [(row[LEARNED], row[f"{LEARNED}_stderr"]) for row in rows]
        panels["loss saved by levels that learn, nats per token"] = {
            "carried, without minus with levels that learn": saved
        }
    curves(path, ends, panels, "position in the text, tokens")


def _edges(args: Arguments, subject: Subject, documents: list[Tensor]) -> list[int]:
    longest_document = max(len(document) for document in documents) - 1
    if args.lengths is None:
        longest = min(longest_document, subject.longest_input or math.inf)
        return [length for length in DEFAULT_LENGTHS if length <= longest] or [longest_document]
    edges = parse_lengths(args.lengths)
    if edges[-1] > longest_document:
        raise ValueError(
            f"--lengths asks for texts of {edges[-1]:,} tokens, and the longest document has {longest_document:,}: "
            "lower it or give a longer text with --validation_file."
        )
    return edges


def _streams(documents: list[Tensor], length: int, start: int, count: int) -> Tensor:
    """Texts of `length` tokens after a start token [n, length + 1]: one from each document, then a second one, ..."""
    cut = []
    for document in documents:
        whole = document[1 : 1 + (len(document) - 1) // length * length].view(-1, length)
        cut += [(index, row) for index, row in enumerate(whole)]
    cut.sort(key=lambda pair: pair[0])
    rows = torch.stack([row for _, row in cut[:count]])
    return torch.cat([torch.full((len(rows), 1), start), rows], 1)


def _carried(
    args: Arguments, subject: Subject, streams: Tensor, edges: list[int], name: str
) -> tuple[Tensor, list[Row]]:
    """Losses [n, T] in one pass, and at each edge the largest size of memories in any batch, if there are memories."""
    pieces = len({*range(PIECE, edges[-1], PIECE), *edges})
    batches = streams.split(args.rows)
    losses, sizes = [], {}
    with progress(None, name, len(batches) * pieces) as bar:

        def after_piece(end, cache):
            bar.update()
            if subject.has_memory and end in edges:
                sizes.setdefault(end, []).append(_size(cache))

        for batch in batches:
            losses.append(carried_scores(subject.model, batch, after_piece, edges).losses)
    return torch.cat(losses), [max(found, key=lambda row: row["state_largest"]) for found in sizes.values()]


def _learned(args: Arguments, subject: Subject, streams: Tensor, edges: list[int]) -> tuple[Tensor, Learned]:
    """Losses [n, T] in one pass in which levels learn, and what they learned."""
    period = subject.model.config.level_learning.resolved(subject.model.config).periods[0]
    batches = streams.split(args.rows)
    with progress(None, "perplexity: levels learn", len(batches) * math.ceil(edges[-1] / period)) as bar:
        read = [learned_scores(subject.model, batch, bar.update) for batch in batches]
    scores, pieces, sizes = zip(*read, strict=True)
    pieces = joined(pieces)
    losses = torch.cat([found.losses for found in scores])
    return losses, Learned(level_rows(pieces, edges, sizes[0]), pieces)


def _size(cache) -> Row:
    tensors = memory_states(cache)
    return {
        "state_largest": max(float(tensor.abs().max()) for tensor in tensors),
        "state_mib": sum(tensor.nbytes for tensor in tensors) / tensors[0].shape[0] / 2**20,
    }


def _windows(args: Arguments, subject: Subject, streams: Tensor, window: int, stride: int) -> Tensor:
    rows = progress(streams, f"perplexity: windows of {stride}")
    return torch.stack([window_scores(subject.model, row, window, stride, args.rows).losses for row in rows])
