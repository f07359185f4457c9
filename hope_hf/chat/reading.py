"""Reading a file: its losses while the levels learn from it, beside those of frozen levels."""

import copy
import math
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from hope_hf import HopeCache
from hope_hf.common.program import LOG_SECONDS, LogLines
from hope_hf.common.results import Row, markdown_table

from .conversation import Conversation, Transcript, Turn

# Tokens of one forward pass, or the next multiple of the period after which levels learn.
PIECE = 512


@dataclass
class _Reader:
    """A way of reading a text, and how well it predicts it."""

    name: str
    cache: HopeCache
    learn: bool
    # losses of the calls so far, in nats of every token but the text's first
    losses: list[Tensor] = field(default_factory=list)
    # logits [1, V] after the last call
    logits: Tensor | None = None
    seconds: float = 0.0

    def read(self, model: PreTrainedModel, ids: Tensor) -> None:
        """Read the next tokens [1, T] of the text."""
        start = time.perf_counter()
        options = {"learn": True} if self.learn else {}
        logits = model(ids, cache=self.cache, **options).logits[0].float()
        before_tokens = logits[:-1]
        targets = ids[0, 1:]
        if self.logits is not None:
            before_tokens = torch.cat([self.logits, before_tokens])
            targets = ids[0]
        self.losses.append(cross_entropy(before_tokens, targets, reduction="none"))
        self.logits = logits[-1:].clone()
        self.seconds += time.perf_counter() - start

    @property
    def row(self) -> Row:
        """Its mean losses."""
        losses = torch.cat(self.losses).double()
        quarter = max(1, len(losses) // 4)
        return {
            "nats per token": self.name,
            "whole text": float(losses.mean()),
            "first quarter": float(losses[:quarter].mean()),
            "last quarter": float(losses[-quarter:].mean()),
        }


def read_text(conversation: Conversation, path: str, text: str, compare: bool = False) -> str:
    """Read the text of a file; returns a report. The next message begins a new conversation, which knows the text.

    Args:
        conversation: reads the text, and learns from it if it learns.
        path: of the file, for the report.
        text: what the file holds.
        compare: whether to read the text a second time, with frozen levels.

    Raises:
        ValueError: it has fewer than two tokens, or more than the model has positions. Nothing was read.
    """
    name = Path(path).name
    ids = conversation.encode(text)
    if len(ids) < 2:
        raise ValueError(f"{path} has fewer than two tokens of the model: name a longer text.")
    unread = list(conversation.transcript.unread)
    conversation.room_for(len(unread) + len(ids))
    cache = conversation.cache
    with conversation.turn(), torch.no_grad():
        if unread:
            conversation.model(conversation.as_input(unread), cache=cache, logits_to_keep=1)
        # no passage is of two files, or of a file and what is said about it
        cache.archive.begin_document()
        reader = _Reader("levels learn" if conversation.learn else "reading", cache, conversation.learn)
        readers = [reader]
        if compare:
            readers.append(_Reader("frozen", copy.deepcopy(cache).reset_levels(), learn=False))
        levels_before = cache.levels
        _read(conversation, readers, ids, name)
        cache.archive.begin_document()
        conversation.transcript = Transcript(begins=cache.get_seq_length())
        conversation.last = Turn(len(ids), 0, reader.seconds)
    rows = [reader.row for reader in readers]
    lines = [f"{name}: {len(ids):,} tokens, {conversation.last.speed:,.0f} per second", "", markdown_table(rows), ""]
    if compare:
        lines.append(_gain(*rows))
    if conversation.learn:
        lines.append(_learned(conversation, levels_before))
    return "\n".join(lines).rstrip()


def _read(conversation: Conversation, readers: list[_Reader], ids: list[int], name: str) -> None:
    """Read the tokens in several calls with every reader, and show the progress."""
    words = "{desc}: {n_fmt} of {total_fmt} tokens, {elapsed} so far, {remaining} to go{postfix}"
    options = {"total": len(ids), "desc": name, "leave": False, "bar_format": words, "unit_scale": False}
    if not sys.stderr.isatty():
        options |= {"file": LogLines(), "mininterval": 0, "miniters": 1, "delay": LOG_SECONDS}
    ends = _ends(conversation, len(ids))
    with tqdm(**options) as bar:
        for start, end in pairwise([0, *ends]):
            piece = conversation.as_input(ids[start:end])
            shown = []
            for reader in readers:
                reader.read(conversation.model, piece)
                losses = reader.losses[-1]
                if len(losses):
                    shown.append(f"{losses.mean():.3f} {reader.name}")
            bar.set_postfix_str(", ".join(shown), refresh=False)
            bar.update(end - start)


def _ends(conversation: Conversation, tokens: int) -> list[int]:
    """Where the calls for a text end: where the levels take steps, so that cuts change no result."""
    config = conversation.model.config
    levels = conversation.cache.levels
    period = PIECE
    if config.level_learning is not None:
        period = config.level_learning.resolved(config).periods[0]
    size = math.ceil(PIECE / period) * period
    # Tokens since the levels' last step.
    waiting = 0 if levels is None else int(levels.tokens[0]) % period
    return [*range(size - waiting, tokens, size), tokens]


def _gain(learning: Row, frozen: Row) -> str:
    """What learning has brought, in words."""
    whole = _change(learning["whole text"], frozen["whole text"])
    end = _change(learning["last quarter"], frozen["last quarter"])
    return f"With learning the loss is {whole}, in the last quarter {end}."


def _change(loss: float, of: float) -> str:
    percent = 100 * abs(loss / of - 1)
    direction = "lower" if loss <= of else "higher"
    return f"{percent:.1f} % {direction}"


def _learned(conversation: Conversation, before) -> str:
    """What the levels have learned from a text; `before` is the `HopeCache.levels` before it."""
    levels = conversation.cache.levels
    steps = int(levels.steps.sum())
    skipped = int(levels.skipped.sum())
    if before is not None:
        steps -= int(before.steps.sum())
        skipped -= int(before.skipped.sum())
    what = f"{steps:,} step" if steps == 1 else f"{steps:,} steps"
    if skipped:
        what += f", {skipped:,} left out (the text looks random)"
    return f"The levels took {what}; {learned_size(conversation)}."


def learned_size(conversation: Conversation) -> str:
    """Drift and size of what the levels have learned, in words."""
    drift = conversation.model.drift(conversation.cache)
    return f"drift {100 * drift:.2f} %, {conversation.cache.level_bytes / 1e6:,.1f} MB"
