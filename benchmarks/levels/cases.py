"""The cases that compare readings of one converted model. Each yields rows as they are measured."""

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.levels.bench import MB, Bench, compared, mean, measured, piece_of, process_mb
from benchmarks.levels.reading import FROZEN, LEARNING, Reading, TrainedReading, frozen_and_learning, read_in_turn
from hope_hf import HopeCache

# Of all blocks: the rate and the drift that were best on another novel.
ALL_BLOCKS = {"rate": 0.0015, "drift": 0.01}
SGD_RATES = (0.003, 0.01, 0.03, 0.1)
SEGMENTS = ("tinyshakespeare", "wikitext", "novel", "code", "tinyshakespeare again")
FINE_TUNING = {
    "SGD 0.03": partial(torch.optim.SGD, lr=0.03),
    "AdamW 1e-05": partial(torch.optim.AdamW, lr=1e-5, weight_decay=0.0),
    "AdamW 3e-05": partial(torch.optim.AdamW, lr=3e-5, weight_decay=0.0),
    "AdamW 0.0001": partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.0),
}
FORMS = ("float32", "bfloat16", "int8")
EVERYWHERE = "learning, all blocks"
ORIGINAL, WINDOW = "original, full attention", "window"


def novel(bench: Bench) -> Iterator[dict]:
    """16K tokens of a novel: frozen, with the defaults, and with all blocks that learn, in turn."""
    model = bench.load()
    blocks = list(range(model.config.num_hidden_layers))
    learning = replace(model.config.level_learning, blocks=blocks, **ALL_BLOCKS)
    readings = frozen_and_learning(model)
    readings[EVERYWHERE] = Reading(bench.load(level_learning=learning), learn=True)
    ids = bench.ids("novel", bench.tokens(16_384))
    yield from compared(readings, ids, piece_of(model))


def original(bench: Bench) -> Iterator[dict]:
    """8,192 tokens of the novel by the model as it was before its window, and with it; frozen and learning, in turn.

    With full attention and frozen levels the logits are those of the pretrained source. It has 8,192 positions.
    """
    windowed = bench.load()
    everything = ["full_attention"] * windowed.config.num_hidden_layers
    whole = bench.load(layer_types=everything, sliding_window=None)
    readings = {}
    for kind, model in {ORIGINAL: whole, WINDOW: windowed}.items():
        for name, reading in frozen_and_learning(model).items():
            readings[f"{kind}, {name}"] = reading
    ids = bench.ids("novel", bench.tokens(8192))
    yield from compared(readings, ids, piece_of(windowed), of=bench.novel.stem)


def long(bench: Bench) -> Iterator[dict]:
    """64K tokens of a novel: loss before and beyond 8K, memory of the process every 4K tokens."""
    model = bench.load()
    piece = piece_of(model)
    readings = frozen_and_learning(model)
    ids = bench.ids("moby_dick", bench.tokens(65_536))
    every = bench.tokens(4096)
    resident = []

    def note(read: int) -> None:
        if read % every == 0:
            resident.append(process_mb())

    read_in_turn(readings.values(), ids, piece, note)
    early = bench.tokens(8192) // piece
    for name, reading in readings.items():
        parts = {
            "before_8k": mean(reading.losses[:early]),
            "beyond_8k": mean(reading.losses[early:]),
        }
        yield {"what": name} | parts | measured(reading, piece) | {"process_mb": resident}


def segments(bench: Bench) -> Iterator[dict]:
    """Five segments of 2,048 tokens, then the first again without learning; beside training of all weights."""
    model = bench.load()
    piece = piece_of(model)
    parts = {}
    for segment in SEGMENTS:
        parts[segment] = part_of(bench, segment)
    first, *later = parts.values()
    makers = {FROZEN: partial(Reading, model), LEARNING: partial(Reading, model, learn=True)}
    for name, make_optimizer in FINE_TUNING.items():
        makers[name] = partial(TrainedReading, model, make_optimizer)
    for name, make in makers.items():
        reading = make()
        read_in_turn([reading], first, piece)
        after_first = again(reading, first, piece)
        for part in later:
            read_in_turn([reading], part, piece)
        losses = torch.tensor(reading.losses, dtype=torch.float64).view(len(parts), -1)
        by_segment = map(mean, losses.tolist())
        yield {
            "what": name,
            "segments": dict(zip(parts, by_segment, strict=True)),
            "loss": mean(reading.losses),
            "first_after_itself": after_first,
            "first_after_all": again(reading, first, piece),
            "cpu_seconds": round(reading.seconds, 2),
        }


def part_of(bench: Bench, segment: str) -> Tensor:
    """The tokens of a segment; those of a second one of a text are further on in it."""
    count = bench.tokens(2048)
    text, _, is_second = segment.partition(" ")
    skipped = 4 * count if is_second else 0
    return bench.ids(text, count, skipped)


def again(reading: Reading, ids: Tensor, piece: int) -> float:
    """Loss of a text without learning, after what the reading has read and learned, which stays as it is."""
    second = copy.copy(reading)
    second.cache = copy.deepcopy(reading.cache)
    second.losses = []
    second.learn = False
    read_in_turn([second], ids, piece)
    return mean(second.losses)


def dynamic(bench: Bench) -> Iterator[dict]:
    """4,096 tokens of the novel: the defaults, and dynamic evaluation, all weights by SGD after each piece."""
    model = bench.load()
    piece = piece_of(model)
    ids = bench.ids("novel", bench.tokens(4096))
    yield from compared(frozen_and_learning(model), ids, piece)
    for rate in SGD_RATES:
        reading = TrainedReading(model, partial(torch.optim.SGD, lr=rate))
        yield from compared({f"SGD of all weights, {rate:g}": reading}, ids, piece, rate=rate)


def hostile(bench: Bench) -> Iterator[dict]:
    """8,192 hostile tokens, then 2,048 of a novel without learning, beside a model that never learned."""
    model = bench.load()
    piece = piece_of(model)
    count = bench.tokens(8192)
    pieces = count // piece
    ids = bench.ids("novel", count + bench.tokens(2048))
    for name, words in hostile_texts(ids[:count], model.config.vocab_size).items():
        readings = frozen_and_learning(model)
        read_in_turn(readings.values(), words, piece)
        for reading in readings.values():
            reading.learn = False
        read_in_turn(readings.values(), ids[count:], piece)
        row = {"what": name, "hostile_loss": mean(readings[LEARNING].losses[:pieces])}
        for reading_name, reading in readings.items():
            row[reading_name] = mean(reading.losses[pieces:])
        row["above"] = row[LEARNING] / row[FROZEN] - 1
        yield row


def hostile_texts(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Texts as long as `ids` [T], the tokens of a novel, from which nothing good can be learned."""
    draw = torch.Generator().manual_seed(0)
    random = torch.randint(vocab_size, ids.shape, generator=draw)
    sentence = ids[:40].repeat(len(ids) // 40 + 1)[: len(ids)]
    spans = (torch.arange(len(ids)) // 64) % 2 == 0
    return {
        "random tokens": random,
        "shuffled text": ids[torch.randperm(len(ids), generator=draw)],
        "one token": ids[:1].expand(len(ids)),
        "a repeated sentence": sentence,
        "text with spans of 64 random tokens": torch.where(spans, ids, random),
    }


def saved(bench: Bench) -> Iterator[dict]:
    """6,144 tokens learned, saved in three forms, and read on by a new process for 2,048 tokens without learning."""
    model = bench.load()
    piece = piece_of(model)
    learned, rest = learned_and_rest(bench)
    reading = Reading(model, learn=True)
    frozen = Reading(model)
    read_in_turn([reading, frozen], learned, piece)
    read_in_turn([frozen], rest, piece)
    yield {"what": FROZEN, "loss": mean(frozen.losses[len(learned) // piece :])}
    here = again(reading, rest, piece)
    yield {"what": "not saved", "loss": here}
    with tempfile.TemporaryDirectory() as temporary:
        folders = {form: Path(temporary, form) for form in FORMS}
        for form, folder in folders.items():
            reading.cache.save_pretrained(folder, model, level_dtype=form)
        losses = bench.apart("saved", "--read_on", temporary)
        for form, folder in folders.items():
            size = sum(file.stat().st_size for file in folder.iterdir())
            yield {
                "what": form,
                "loss": losses[form],
                "difference": losses[form] - here,
                "file_mb": round(size / MB, 2),
            }


def learned_and_rest(bench: Bench) -> tuple[Tensor, Tensor]:
    """The tokens of the novel that `saved` learns, and those that follow."""
    count = bench.tokens(6144)
    ids = bench.ids("novel", count + bench.tokens(2048))
    return ids[:count], ids[count:]


def read_on(bench: Bench, folder: Path) -> dict[str, float]:
    """What the new process of `saved` measures: the loss after each saved form."""
    model = bench.load()
    _, rest = learned_and_rest(bench)
    losses = {}
    for form in FORMS:
        reading = Reading(model)
        reading.cache = HopeCache.from_pretrained(folder / form, model)
        read_in_turn([reading], rest, piece_of(model))
        losses[form] = mean(reading.losses)
    return losses
