"""What every case has: the model, the texts as tokens, lengths, and the form of a row."""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from benchmarks.levels.reading import Reading, read_in_turn
from benchmarks.measuring import held_bytes, resident_kib
from benchmarks.quality.texts import FILES, book

MB = 10**6
WIKITEXT = {"wikitext": "wikitext2_test.txt", "wikitext_validation": "wikitext2_valid.txt"}
# Shorter paragraphs before the first one of this many characters are a novel's title and contents.
PARAGRAPH = 1000


@dataclass
class Bench:
    """Settings of one call of the program."""

    model: Path
    data_dir: Path
    novel: Path
    dtype: str = "bfloat16"
    shorten: int = 1

    def load(self, dtype: torch.dtype | None = None, **changes) -> PreTrainedModel:
        """The model in evaluation mode, in --dtype unless another is given; `changes` are fields of its config."""
        dtype = dtype or getattr(torch, self.dtype)
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype, **changes)
        return model.eval().requires_grad_(False)

    @cached_property
    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.model)

    def apart(self, case: str, *words: object) -> dict:
        """The JSON object that this program prints last for a case in a process of its own."""
        folder = Path(__file__).resolve().parents[1]
        command = [sys.executable, folder / "levels.py", case, *words]
        for field in fields(self):
            command += [f"--{field.name}", getattr(self, field.name)]
        done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
        *_, last = done.stdout.splitlines()
        return json.loads(last)

    def tokens(self, count: int) -> int:
        """A number of tokens, divided by --shorten."""
        return max(1, count // self.shorten)

    def ids(self, text: str, count: int, skipped: int = 0) -> Tensor:
        """`count` tokens of a text, the first `skipped` of which are left out; ValueError if it is shorter."""
        stop = skipped + count
        # a token has at most about eight characters
        words = self.text(text)[: 8 * stop + 64]
        ids = self.tokenizer(words, add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) < stop:
            raise ValueError(f"The text {text} has {len(ids):,} tokens, not {stop:,}: use --shorten.")
        return torch.tensor(ids[skipped:stop])

    def text(self, name: str) -> str:
        """The text `novel`, `code`, `tinyshakespeare`, `moby_dick` or one of WIKITEXT."""
        if name == "code":
            return Path(argparse.__file__).read_text(encoding="utf-8")
        flag = "--novel"
        path = self.novel
        if name != "novel":
            flag = "--data_dir"
            files = FILES | WIKITEXT
            path = self.data_dir / "text" / files[name]
        try:
            text = path.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8"
            raise ValueError(f"{flag}: {path} cannot be read ({reason}).") from None
        if name in ("novel", "moby_dick"):
            return from_first_paragraph(book(text))
        return text


def from_first_paragraph(text: str) -> str:
    """A novel from its first long paragraph on."""
    paragraphs = text.split("\n\n")
    is_long = [len(paragraph) >= PARAGRAPH for paragraph in paragraphs]
    first = is_long.index(True) if True in is_long else 0
    return "\n\n".join(paragraphs[first:]).lstrip()


def piece_of(model: PreTrainedModel) -> int:
    """Tokens between two steps of the model's levels: the pieces in which the cases read."""
    learning = model.config.level_learning.resolved(model.config)
    return min(learning.periods)


def compared(readings: dict[str, Reading], ids: Tensor, piece: int, **labels: object) -> Iterator[dict]:
    """The rows of readings that read a text [T] in turn; `labels` are further columns."""
    read_in_turn(readings.values(), ids, piece)
    for name, reading in readings.items():
        yield {"what": name} | labels | measured(reading, piece)


def measured(reading: Reading, piece: int) -> dict:
    """Loss of a reading, of its last quarter and of each piece; CPU seconds; MB of its state and of its deltas."""
    losses = reading.losses
    last_quarter = losses[len(losses) * 3 // 4 :]
    return {
        "tokens": piece * len(losses),
        "loss": mean(losses),
        "last_quarter": mean(last_quarter),
        "cpu_seconds": round(reading.seconds, 4),
        "state_mb": round(held_bytes(reading.cache) / MB, 2),
        "learned_mb": round(reading.cache.level_bytes / MB, 2),
        "by_piece": [round(loss, 5) for loss in losses],
        "piece": piece,
    }


def mean(losses: list[float]) -> float:
    return round(statistics.mean(losses), 5)


def process_mb() -> int:
    """Megabytes of this process."""
    return round(resident_kib("VmRSS") * 1024 / MB)
