"""Reading a file: its losses while the levels learn from it, beside those of frozen levels."""

import copy
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from hope_hf import HopeCache
from hope_hf.common.files import read_small
from hope_hf.common.process import one_line
from hope_hf.common.program import LOG_SECONDS, LogLines
from hope_hf.common.results import Row, markdown_table

from .conversation import Conversation, Place

# Tokens of one forward pass, or the next multiple of the period after which levels learn.
PIECE = 512


@dataclass
class _Reader:
    """A way of reading a text, and how well it predicts it."""

    name: str
    cache: HopeCache
    learn: bool
    # losses of the pieces read so far, in nats of every token but the text's first
    losses: list[torch.Tensor] = field(default_factory=list)
    # logits after the last piece
    logits: torch.Tensor | None = None
    seconds: float = 0.0

    def read(self, model, piece: torch.Tensor) -> None:
        """Read the next tokens [1, T] of the text."""
        start = time.perf_counter()
        options = {"learn": True} if self.learn else {}
        logits = model(piece, cache=self.cache, **options).logits[0].float()
        rows, targets = logits[:-1], piece[0, 1:]
        if self.logits is not None:
            rows, targets = torch.cat([self.logits, rows]), piece[0]
        self.losses.append(cross_entropy(rows, targets, reduction="none"))
        self.logits = logits[-1:].clone()
        self.seconds += time.perf_counter() - start

    @property
    def row(self) -> Row:
        """Its mean losses."""
        losses = torch.cat(self.losses).double()
        quarter = max(1, len(losses) // 4)
        parts = {"whole text": losses, "first quarter": losses[:quarter], "last quarter": losses[-quarter:]}
        return {"nats per token": self.name} | {name: float(part.mean()) for name, part in parts.items()}


def text_of(path: str, named: str) -> str:
    """The text of a file; ValueError if it cannot be read, is no text in UTF-8, or is empty."""
    try:
        text = read_small(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise ValueError(f"{named} {path} cannot be read as text in UTF-8: {reason}.") from None
    if not text.strip():
        raise ValueError(f"{named} {path} is empty: name a file with text.")
    return text


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
    unread = list(conversation.place.unread)
    conversation.room_for(len(unread) + len(ids))
    cache, learn = conversation.cache, conversation.learn
    with conversation.turn() as took, torch.no_grad():
        if unread:
            conversation.model(conversation.as_input(unread), cache=cache, logits_to_keep=1)
        own = _Reader("levels learn" if learn else "reading", cache, learn)
        readers = [own]
        if compare:
            readers.append(_Reader("frozen", copy.deepcopy(cache).reset_levels(), False))
        learned = cache.levels
        _read(conversation, readers, ids, name)
        conversation.place = Place()
        took(len(ids), 0, own.seconds)
    lines = [f"{name}: {len(ids):,} tokens, {conversation.last.speed:,.0f} per second", ""]
    lines += [markdown_table([reader.row for reader in readers]), ""]
    if compare:
        lines.append(_gain(own.row, readers[1].row))
    if learn:
        lines.append(_learned(conversation, learned))
    return "\n".join(lines).rstrip()


def _read(conversation: Conversation, readers: list[_Reader], ids: list[int], name: str) -> None:
    """Read the tokens piece by piece with every reader, and show the progress."""
    ends = _ends(conversation, len(ids))
    words = "{desc}: {n_fmt} of {total_fmt} tokens, {elapsed} so far, {remaining} to go{postfix}"
    log = {"file": LogLines(), "mininterval": 0, "miniters": 1, "delay": LOG_SECONDS}
    options = {} if sys.stderr.isatty() else log
    with tqdm(total=len(ids), desc=name, leave=False, bar_format=words, unit_scale=False, **options) as bar:
        for start, end in pairwise([0, *ends]):
            for reader in readers:
                reader.read(conversation.model, conversation.as_input(ids[start:end]))
            last = (f"{reader.losses[-1].mean():.3f} {reader.name}" for reader in readers if len(reader.losses[-1]))
            bar.set_postfix_str(", ".join(last), refresh=False)
            bar.update(end - start)


def _ends(conversation: Conversation, tokens: int) -> list[int]:
    """Where the pieces of a text end: where the levels take steps, so that pieces change no result."""
    levels = conversation.model.config.level_learning
    period = PIECE if levels is None else levels.resolved(conversation.model.config).periods[0]
    state = conversation.cache.levels
    size = -(-PIECE // period) * period
    first = size - (0 if state is None else int(state.tokens[0]) % period)
    return [*range(first, tokens, size), tokens]


def _gain(own: Row, frozen: Row) -> str:
    """What learning has brought, in words."""
    whole, end = (
        f"{abs(own[part] / frozen[part] - 1):.1%} {'lower' if own[part] <= frozen[part] else 'higher'}"
        for part in ("whole text", "last quarter")
    )
    return f"With learning the loss is {whole}, in the last quarter {end}.".replace("%", " %")


def _learned(conversation: Conversation, before) -> str:
    """What the levels have learned from a text; `before` is their state before it."""
    state = conversation.cache.levels
    steps, skipped = (int(part.sum()) for part in (state.steps, state.skipped))
    if before is not None:
        steps, skipped = steps - int(before.steps.sum()), skipped - int(before.skipped.sum())
    left_out = f", {skipped:,} left out (the text looks random)" if skipped else ""
    return f"The levels took {steps:,} step{'' if steps == 1 else 's'}{left_out}; {learned_size(conversation)}."


def learned_size(conversation: Conversation) -> str:
    """Drift and size of what the levels have learned, in words."""
    drift = conversation.model.drift(conversation.cache)
    return f"drift {100 * drift:.2f} %, {conversation.cache.level_bytes / 1e6:,.1f} MB"
