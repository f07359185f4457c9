"""A whole book: whether memory and speed at its end are what they were at its beginning."""

import statistics
import time
from collections.abc import Iterator

from benchmarks.levels.bench import Bench, mean, piece_of, process_mb
from benchmarks.levels.reading import Reading, read_in_turn
from hope_hf import HopeCache

# Tokens of the book, of a call, and of the passage that measures the machine.
BOOK, CALL, PASSAGE = 102_400, 4096, 1024
# Share of the calls that are the book's beginning, and its end.
ENDS = 0.2


def book(bench: Bench) -> Iterator[dict]:
    """100K tokens of Moby Dick, learned with a bar: CPU time and memory of the process after every 4K.

    After each call the model reads a passage from its start, without learning: CPU time over that of the passage
    tells whether learning becomes slower, or the machine.
    """
    model = bench.load()
    cache = HopeCache(model.config)
    piece = piece_of(model)
    ids = bench.ids("moby_dick", bench.tokens(BOOK))
    passage = ids[: bench.tokens(PASSAGE)]
    losses = []
    milliseconds = []
    over_passage = []
    resident = []
    for part in ids.split(bench.tokens(CALL)):
        start = time.process_time()
        report = model.learn(part[None], cache=cache, progress=True)
        spent = time.process_time() - start
        reading = Reading(model)
        read_in_turn([reading], passage, piece)
        losses += report.losses
        of_token = spent / len(part)
        of_passage = reading.seconds / len(passage)
        milliseconds.append(1000 * of_token)
        over_passage.append(of_token / of_passage)
        resident.append(process_mb())
    yield {
        "what": "learning",
        "tokens": len(ids),
        "loss": mean(losses),
        "milliseconds": ends(milliseconds),
        "over_passage": ends(over_passage),
        "process_mb": resident,
    }


def ends(values: list[float]) -> list[float]:
    """The median of the values at the beginning of the book, and of those at its end."""
    number = max(1, round(ENDS * len(values)))
    first = statistics.median(values[:number])
    last = statistics.median(values[-number:])
    return [round(first, 4), round(last, 4)]
