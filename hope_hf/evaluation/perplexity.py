"""Loss and perplexity of a model on whole texts, and by position in long texts with controls."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hope_hf import frozen_memories
from hope_hf.common.progress import progress
from hope_hf.common.results import next_token_accuracy
from hope_hf.data import bytes_per_id
from hope_hf.frozen import mixed_losses

from .display import curves, small_curves
from .flags import Arguments, parse_lengths
from .held_out import HeldOut, held_out_documents
from .levels import Piece, joined, learned_scores, level_panels, level_rows
from .result import TEXT_TABLE, Number, Row, SuiteResult, put, summary_row
from .streams import (
    Scores,
    bits_per_byte,
    carried_scores,
    document_scores,
    joined_scores,
    mean_of_blocks,
    memory_states,
    piece_ends,
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
    held_out = held_out_documents(args).head(args.limit)
    ids = held_out.encoded(subject.encode)
    if args.limit:
        most = parse_lengths(args.lengths)[-1] if args.lengths else LIMITED
        ids = [row[:most] for row in ids]
        held_out = replace(held_out, texts=subject.tokenizer.batch_decode(ids))
    documents = [torch.tensor([subject.start, *row]) for row in ids]
    whole, corpora = by_corpus(args, subject, held_out, documents)
    tables = {f"{TEXT_TABLE}{held_out.source}": [whole]}
    if corpora:
        tables["By corpus"] = corpora
    positions, learned = by_position(args, subject, documents)
    tables |= _split_columns(positions)
    pictures = {"loss_by_position.png": partial(draw, positions)}
    if learned:
        tables["Levels that learn, by position"] = learned.rows
        if learned.pieces:
            panels = level_panels(learned.pieces)
            pictures["levels.png"] = partial(small_curves, panels=panels, x_label="position in the text, tokens")
    vocab_size = subject.model.config.vocab_size
    summary = _summary(whole, positions[-1], vocab_size)
    return SuiteResult(tables, pictures, summary=summary)


def _split_columns(positions: list[Row]) -> dict[str, list[Row]]:
    """The columns by position as two tables that fit a terminal."""
    losses = []
    gains = []
    for row in positions:
        loss = {}
        gain = {"positions": row["positions"], "n": row["n"]}
        for name, value in row.items():
            if "_minus_" in name or name.startswith("state_"):
                gain[name] = value
            else:
                loss[name] = value
        losses.append(loss)
        gains.append(gain)
    tables = {"Loss by position": losses}
    if len(gains[0]) > 2:
        tables["Gain of the carried state over each control, and its size"] = gains
    return tables


def _summary(whole: Row, last: Row, vocab_size: int) -> list[Row]:
    """The main numbers; `last`: the row of the last positions."""
    chances = {
        "loss": ("loss, nats per token", math.log(vocab_size)),
        "perplexity": ("perplexity", vocab_size),
        "accuracy": ("accuracy of the likeliest token", 1 / vocab_size),
    }
    summary = []
    for column, (name, chance) in chances.items():
        number = _number(whole, column)
        summary.append(summary_row(name, *number, chance))
    savers = {"frozen_minus_loss": "live memories", LEARNED: "levels that learn"}
    for column, saver in savers.items():
        if column in last:
            number = _number(last, column)
            name = f"loss saved by {saver}, tokens {last['positions']}"
            summary.append(summary_row(name, *number, 0.0))
    return summary


class Part(NamedTuple):
    """A document that was read."""

    corpus: str
    tokens: Tensor
    scores: Scores
    num_bytes: int


def by_corpus(args: Arguments, subject: Subject, held_out: HeldOut, documents: list[Tensor]) -> tuple[Row, list[Row]]:
    """A row for all documents, each read by itself from its beginning, and one for every corpus if there are several.

    Every token has the same weight.
    """
    scores = document_scores(args, subject, documents, "perplexity: batches of documents")
    losses = joined_scores(scores).losses
    require_finite(losses, "perplexity: the model's losses on the text")
    parts = []
    for corpus, text, document, of_document in zip(held_out.corpora, held_out.texts, documents, scores, strict=True):
        num_bytes = len(text.encode("utf-8"))
        parts.append(Part(corpus, document[1:], of_document, num_bytes))
    parts.sort(key=lambda part: len(part.tokens))
    names = list(dict.fromkeys(held_out.corpora))
    corpora = []
    if len(names) > 1:
        for name in names:
            of_corpus = [part for part in parts if part.corpus == name]
            corpora.append({"corpus": name, **_row(of_corpus)})
    return _row(parts), corpora


def _row(parts: list[Part]) -> Row:
    _, tokens, scores, num_bytes = zip(*parts, strict=True)
    tokens = torch.cat(tokens)
    losses, guesses = joined_scores(scores)
    accuracy = next_token_accuracy()
    accuracy.add_batch(predictions=guesses.tolist(), references=tokens.tolist())
    loss, stderr = mean_of_blocks(losses)
    perplexity = math.exp(min(loss, 700.0))
    tokens_per_byte = len(tokens) / sum(num_bytes)
    of_hits = mean_of_blocks(guesses == tokens)
    return {
        "documents": len(parts),
        "n": len(tokens),
        "loss": loss,
        "loss_stderr": stderr,
        "perplexity": perplexity,
        "perplexity_stderr": stderr and perplexity * stderr,
        **bits_per_byte(loss, stderr, tokens_per_byte),
        **accuracy.compute(),
        "accuracy_stderr": of_hits.stderr,
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
    losses, sizes, learned = _losses_by_mode(args, subject, streams, edges)
    for mode, losses_of_mode in losses.items():
        require_finite(losses_of_mode, f"perplexity: the model's losses on texts of {edges[-1]:,} tokens ({mode})")
    mixed = None
    if {"loss", "frozen"} <= losses.keys():
        mixed = mixed_losses([losses["loss"], losses["frozen"]])
    # a column of the table each
    columns = losses | _gains(losses)
    bytes_of_ids = torch.tensor(bytes_per_id(subject.tokenizer))
    bytes_of_tokens = bytes_of_ids[streams[:, 1:]]
    first_mode = next(iter(losses))
    rows = []
    for start, end in pairwise([0, *edges]):
        # All texts, and the positions of the bucket.
        bucket = (slice(None), slice(start, end))
        bytes_of_bucket = bytes_of_tokens[bucket]
        num_tokens = bytes_of_bucket.numel()
        num_bytes = int(bytes_of_bucket.sum())
        row = {"positions": f"{start + 1:,}-{end:,}", "n": num_tokens}
        for name, values in columns.items():
            put(row, name, mean_of_blocks(values[bucket]))
        if mixed is not None:
            row["mixed"] = float(mixed[bucket].mean())
        loss, stderr = _number(row, first_mode)
        row |= bits_per_byte(loss, stderr, num_tokens / max(1, num_bytes))
        row |= sizes.get(end, {})
        rows.append(row)
    return rows, learned


def _gains(losses: dict[str, Tensor]) -> dict[str, Tensor]:
    """By column, what the carried state saves at each token [n, T] over the controls, and levels that learn over it.

    Paired by token: their error is the standard error of the difference.
    """
    gains = {}
    if "loss" in losses:
        for control in CONTROLS:
            if control in losses:
                gains[f"{control}_minus_loss"] = losses[control] - losses["loss"]
    if "levels_learn" in losses:
        gains[LEARNED] = losses["loss"] - losses["levels_learn"]
    return gains


def _losses_by_mode(
    args: Arguments, subject: Subject, streams: Tensor, edges: list[int]
) -> tuple[dict[str, Tensor], dict[int, Row], Learned | None]:
    """Losses [n, T] by mode, the size of the carried state at each edge, and what levels learned."""
    bound = subject.longest_input or math.inf
    losses = {}
    sizes = {}
    learned = None
    if edges[-1] <= bound:
        losses["loss"], sizes = _carried(args, subject, streams, edges, "perplexity: by position")
        if subject.learns:
            losses["levels_learn"], learned = _learned(args, subject, streams, edges)
    if subject.has_memory:
        with frozen_memories(subject.model):
            losses["frozen"], _ = _carried(args, subject, streams, edges, "perplexity: by position, memories frozen")
    if len(edges) > 1:
        second_longest = edges[-2]
    else:
        second_longest = max(2, edges[0] // 2)
    window = min(bound, LONGEST_WINDOW, second_longest)
    losses["window"] = _windows(args, subject, streams, window, window // 2)
    if RESET_EVERY < bound:
        losses[f"reset_{RESET_EVERY}"] = _windows(args, subject, streams, RESET_EVERY + 1, RESET_EVERY)
    return losses, sizes, learned


def draw(rows: list[Row], path: Path):
    """Plot over the last position of each bucket: every mode's loss, and the gain of the carried state over each.

    A third panel has what levels that learn save.
    """
    losses = {}
    gains = {}
    columns = rows[0].keys()
    for mode, label in LABELS.items():
        gain = f"{mode}_minus_loss"
        if mode in columns:
            losses[label] = _column(rows, mode)
        if gain in columns:
            gains[label] = _column(rows, gain)
    panels = {"loss, nats per token": losses}
    if gains:
        panels["loss above that with the state carried, nats per token"] = gains
    if LEARNED in columns:
        saved = {"carried, without minus with levels that learn": _column(rows, LEARNED)}
        panels["loss saved by levels that learn, nats per token"] = saved
    ends = []
    for row in rows:
        _, _, end = row["positions"].partition("-")
        ends.append(int(end.replace(",", "")))
    curves(path, ends, panels, "position in the text, tokens")


def _column(rows: list[Row], name: str) -> list[Number]:
    """A column's values with their errors."""
    return [_number(row, name) for row in rows]


def _number(row: Row, name: str) -> Number:
    """A value of a row with its error."""
    return Number(row[name], row[f"{name}_stderr"])


def _edges(args: Arguments, subject: Subject, documents: list[Tensor]) -> list[int]:
    longest_document = max(map(len, documents)) - 1
    if args.lengths is None:
        longest = min(longest_document, subject.longest_input or math.inf)
        edges = [length for length in DEFAULT_LENGTHS if length <= longest]
        return edges or [longest_document]
    edges = parse_lengths(args.lengths)
    if edges[-1] > longest_document:
        raise ValueError(
            f"--lengths asks for texts of {edges[-1]:,} tokens, and the longest document has {longest_document:,}: "
            "lower it or give a longer text with --validation_file."
        )
    return edges


def _streams(documents: list[Tensor], length: int, start: int, count: int) -> Tensor:
    """Texts of `length` tokens after a start token [n, length + 1]: one from each document, then a second one, ..."""
    by_document = []
    for document in documents:
        texts = document[1:].split(length)
        by_document.append([text for text in texts if len(text) == length])
    rows = []
    for texts in zip_longest(*by_document):
        rows += [text for text in texts if text is not None]
    streams = torch.stack(rows[:count])
    return F.pad(streams, (1, 0), value=start)


def _carried(
    args: Arguments, subject: Subject, streams: Tensor, edges: list[int], name: str
) -> tuple[Tensor, dict[int, Row]]:
    """Losses [n, T] in one pass, and at each edge the largest size of memories in any batch, if there are memories."""
    batches = streams.split(args.rows)
    scores = []
    sizes = {end: [] for end in edges} if subject.has_memory else {}
    pieces = piece_ends(edges[-1], edges)
    with progress(None, name, len(batches) * len(pieces)) as bar:

        def after_piece(end, cache):
            bar.update()
            if end in sizes:
                sizes[end].append(_size(cache))

        for batch in batches:
            scores.append(carried_scores(subject.model, batch, after_piece, edges))
    largest = {}
    for end, sizes_of_batches in sizes.items():
        largest[end] = max(sizes_of_batches, key=itemgetter("state_largest"))
    return joined_scores(scores).losses, largest


def _learned(args: Arguments, subject: Subject, streams: Tensor, edges: list[int]) -> tuple[Tensor, Learned]:
    """Losses [n, T] in one pass in which levels learn, and what they learned."""
    config = subject.model.config
    period = config.level_learning.resolved(config).periods[0]
    batches = streams.split(args.rows)
    scores = []
    pieces = []
    pieces_of_text = math.ceil(edges[-1] / period)
    with progress(None, "perplexity: levels learn", len(batches) * pieces_of_text) as bar:
        for batch in batches:
            of_batch, pieces_of_batch, sizes = learned_scores(subject.model, batch, bar.update)
            scores.append(of_batch)
            pieces.append(pieces_of_batch)
    pieces = joined(pieces)
    rows = level_rows(pieces, edges, sizes)
    return joined_scores(scores).losses, Learned(rows, pieces)


def _size(cache) -> Row:
    states = memory_states(cache)
    rows = len(states[0])
    largest = max(float(state.abs().max()) for state in states)
    num_bytes = sum(state.nbytes for state in states)
    return {"state_largest": largest, "state_mib": num_bytes / rows / 2**20}


def _windows(args: Arguments, subject: Subject, streams: Tensor, window: int, stride: int) -> Tensor:
    losses = []
    for row in progress(streams, f"perplexity: windows of {window} every {stride}"):
        scores = window_scores(subject.model, row, window, stride, args.rows)
        losses.append(scores.losses)
    return torch.stack(losses)
