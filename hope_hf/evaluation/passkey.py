"""Passkey recall: a number is hidden in filler text and asked for at the end."""

import math
import random
from functools import partial
from pathlib import Path

import torch

from .arguments import MODEL, Arguments, reads
from .display import Panel, by_depth, heat_maps, progress
from .parsing import parse_depths, parse_lengths
from .result import Row, SuiteResult, means, summary_row
from .streams import carried_scores, frozen_memories
from .subject import Subject, require_finite

DEFAULT_LENGTHS = "256,512,1k"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key. "
QUESTION = "What is the pass key? The pass key is"
DIGITS = 5


@reads(*MODEL, "lengths", "depths", "samples_per_length", "limit", "batch_size", "seed")
def passkey(args: Arguments, subject: Subject) -> SuiteResult:
    """Recall by length and depth: five digits hidden in filler text, and a question about them at the end.

    Teacher-forced: `exact`, the share of samples whose every digit token is the likeliest, and `loss`, nats per digit
    token; `frozen`, the same loss with the memories frozen: the loss of guessing without having read the key.
    `generated`: the share of samples whose greedy continuation begins with the key.
    """
    lengths, depths = parse_lengths(args.lengths or DEFAULT_LENGTHS), parse_depths(args.depths)
    subject.require_positions(lengths[-1])
    rows = []
    with progress(None, "passkey", len(lengths) * len(depths)) as bar:
        for length in lengths:
            for depth in depths:
                samples = [
                    make_sample(subject, length, depth, args.seed + index) for index in range(args.texts_per_length)
                ]
                rows.append({"length": length, "depth": depth, **_measure(args, subject, samples)})
                bar.update()
    pictures = {f"passkey_{name}.png": partial(draw, rows, name) for name in ("exact", "generated")}
    found = [
        summary_row("key generated, mean of all cells", _mean(rows, "generated"), None, 1 / (9 * 10 ** (DIGITS - 1))),
        summary_row("key exact, teacher-forced", _mean(rows, "exact"), None, _mean(rows, "chance")),
        summary_row("loss, nats per token of the key", _mean(rows, "loss"), None, _mean(rows, "chance_loss")),
    ]
    if "frozen" in rows[0]:
        found.append(summary_row("the same, memories frozen", _mean(rows, "frozen"), None, found[-1]["chance"]))
    return SuiteResult({"Passkey": rows}, pictures, summary=found)


def _mean(rows: list[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def make_sample(subject: Subject, length: int, depth: float, seed: int) -> tuple[list[int], list[int], str]:
    """(prompt, answer, key): prompt and answer have exactly `length` tokens together, the start token counted.

    The filler is cut to fit the length. Raises ValueError where the length is too short.
    """
    key = str(random.Random(f"passkey {seed}").randrange(10 ** (DIGITS - 1), 10**DIGITS))
    needle, question = subject.encode(NEEDLE.format(key=key)), subject.encode(QUESTION)
    answer = subject.encode(f"{QUESTION} {key}")[len(question) :]
    room = length - 1 - len(needle) - len(question) - len(answer)
    if room < 0:
        raise ValueError(
            f"--lengths {length} is too short for the key and the question: give at least {length - room} tokens."
        )
    filler = subject.encode(FILLER)
    before = round(room * depth)
    around = [(filler * (count // len(filler) + 1))[:count] for count in (before, room - before)]
    return [subject.start, *around[0], *needle, *around[1], *question], answer, key


def _measure(args: Arguments, subject: Subject, samples: list) -> Row:
    exact, losses, frozen, generated = [], [], [], []
    # Keys differ in their number of tokens: a batch has prompts of one length, so that nothing is padded.
    for size in sorted({len(prompt) for prompt, _, _ in samples}):
        alike = [sample for sample in samples if len(sample[0]) == size]
        for start in range(0, len(alike), args.rows):
            batch = alike[start : start + args.rows]
            texts = torch.tensor([prompt + answer for prompt, answer, _ in batch])
            scores = carried_scores(subject.model, texts)
            answers = slice(size - 1, None)
            losses += scores.losses[:, answers].mean(1).tolist()
            exact += (scores.guesses[:, answers] == texts[:, size:]).all(1).float().tolist()
            if subject.has_memory:
                with frozen_memories(subject.model):
                    frozen += carried_scores(subject.model, texts).losses[:, answers].mean(1).tolist()
            generated += _generate(subject, texts[:, :size], [key for _, _, key in batch])
    require_finite(torch.tensor(losses), "passkey: the model's losses")
    columns = {"exact": exact, "generated": generated, "loss": losses} | ({"frozen": frozen} if frozen else {})
    # What one scores who says every token of the vocabulary alike.
    size = subject.model.config.vocab_size
    chances = [float(size) ** -len(answer) for _, answer, _ in samples]
    return means(columns) | {"chance": sum(chances) / len(chances), "chance_loss": math.log(size)}


def _generate(subject: Subject, prompts: torch.Tensor, keys: list[str]) -> list[float]:
    # a digit is at least one token, and a space may be one
    said = subject.continued(prompts, DIGITS + 1)
    return [float(text.strip().startswith(key)) for text, key in zip(said, keys, strict=True)]


def draw(rows: list[Row], name: str, path: Path):
    """Heat map of one column over length and depth."""
    cells, names = by_depth(rows)
    title = {"exact": "pass key, teacher-forced", "generated": "pass key, generated"}[name]
    panel = Panel(title, [[row[name] for row in line] for line in cells])
    heat_maps(path, [panel], *names, ("length, tokens", "depth of the key (0: first)"))
