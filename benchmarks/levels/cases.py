"""The cases that compare readings of one converted model. Each yields rows as they are measured."""

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.levels.bench import MB, Bench, mean, measured, piece_of
from benchmarks.levels.reading import FROZEN, LEARNING, Reading, TrainedReading, frozen_and_learning, read_in_turn
from benchmarks.measuring import resident_kib
from hope_hf import HopeCache

# Of all blocks: the rate and the drift that were best on another novel.
ALL_BLOCKS = {"rate": 0.0015, "drift": 0.01}
SGD_RATES = (0.003, 0.01, 0.03, 0.1)
SEGMENTS = ("tinyshakespeare", "wikitext", "novel", "code", "tinyshakespeare again")
FINE_TUNING = {
    "SGD 0.03": partial(torch.optim.SGD, lr=0.03),
    **{f"AdamW {rate:g}": partial(torch.optim.AdamW, lr=rate, weight_decay=0.0) for rate in (1e-5, 3e-5, 1e-4)},
}
FORMS = ("float32", "bfloat16", "int8")
EVERYWHERE = "learning, all blocks"
ORIGINAL, WINDOW = "original, full attention", "window"


def novel(bench: Bench) -> Iterator[dict]:
    """16K tokens of a novel: frozen, with the defaults, and with all blocks that learn, in turn."""
    model = bench.load()
    blocks = list(range(model.config.num_hidden_layers))
    everywhere = bench.load(level_learning=replace(model.config.level_learning, blocks=blocks, **ALL_BLOCKS))
    readings = frozen_and_learning(model) | {EVERYWHERE: Reading(everywhere, learn=True)}
    ids, piece = bench.ids("novel", bench.tokens(16_384)), piece_of(model)
    read_in_turn(readings.values(), ids, piece)
    yield from ({"what": name} | measured(reading, piece) for name, reading in readings.items())


def original(bench: Bench) -> Iterator[dict]:
    """8,192 tokens of the novel by the model as it was before its window, and with it; frozen and learning, in turn.

    With full attention and frozen levels the logits are those of the pretrained source. It has 8,192 positions.
    """
    windowed = bench.load()
    everything = ["full_attention"] * windowed.config.num_hidden_layers
    whole = bench.load(layer_types=everything, sliding_window=None)
    readings = {f"{ORIGINAL}, {name}": reading for name, reading in frozen_and_learning(whole).items()}
    readings |= {f"{WINDOW}, {name}": reading for name, reading in frozen_and_learning(windowed).items()}
    ids, piece = bench.ids("novel", bench.tokens(8192)), piece_of(windowed)
    read_in_turn(readings.values(), ids, piece)
    for name, reading in readings.items():
        yield {"what": name, "of": bench.novel.stem} | measured(reading, piece)


def long(bench: Bench) -> Iterator[dict]:
    """64K tokens of a novel: loss before and beyond 8K, memory of the process every 4K tokens."""
    model = bench.load()
    readings, piece = frozen_and_learning(model), piece_of(model)
    ids, every, resident = bench.ids("moby_dick", bench.tokens(65_536)), bench.tokens(4096), []

    def note(read: int) -> None:
        if read % every == 0:
            resident.append(round(resident_kib("VmRSS") * 1024 / MB))

    read_in_turn(readings.values(), ids, piece, note)
    early = bench.tokens(8192) // piece
    for name, reading in readings.items():
        parts = {"before_8k": mean(reading.losses[:early]), "beyond_8k": mean(reading.losses[early:])}
        yield {"what": name} | parts | measured(reading, piece) | {"process_mb": resident}


def segments(bench: Bench) -> Iterator[dict]:
    """Five segments of 2,048 tokens, then the first again without learning; beside training of all weights."""
    model = bench.load()
    count, piece = bench.tokens(2048), piece_of(model)
    parts = [bench.ids(*part_of(name, count)) for name in SEGMENTS]
    makers = {FROZEN: partial(Reading, model), LEARNING: partial(Reading, model, learn=True)}
    makers |= {name: partial(TrainedReading, model, make) for name, make in FINE_TUNING.items()}
    for name, make in makers.items():
        reading = make()
        read_in_turn([reading], parts[0], piece)
        after_first = again(reading, parts[0], piece)
        for part in parts[1:]:
            read_in_turn([reading], part, piece)
        pieces = len(reading.losses) // len(parts)
        losses = [mean(reading.losses[start : start + pieces]) for start in range(0, len(reading.losses), pieces)]
        yield {
            "what": name,
            "segments": dict(zip(SEGMENTS, losses, strict=True)),
            "loss": mean(reading.losses),
            "first_after_itself": after_first,
            "first_after_all": again(reading, parts[0], piece),
            "cpu_seconds": round(reading.seconds, 2),
        }


def part_of(segment: str, count: int) -> tuple[str, int, int]:
    """Text, number of tokens, and tokens left out, of a segment."""
    text, _, is_second = segment.partition(" ")
    return text, count, 4 * count if is_second else 0


def again(reading: Reading, ids: Tensor, piece: int) -> float:
    """Loss of a text without learning, after what the reading has read and learned, which stays as it is."""
    second = copy.copy(reading)
    second.cache, second.losses, second.learn = copy.deepcopy(reading.cache), [], False
    read_in_turn([second], ids, piece)
    return mean(second.losses)


def dynamic(bench: Bench) -> Iterator[dict]:
    """4,096 tokens of the novel: the defaults, and dynamic evaluation, all weights by SGD after each piece."""
    model = bench.load()
    ids, piece = bench.ids("novel", bench.tokens(4096)), piece_of(model)
    readings = frozen_and_learning(model)
    read_in_turn(readings.values(), ids, piece)
    yield from ({"what": name} | measured(reading, piece) for name, reading in readings.items())
    for rate in SGD_RATES:
        reading = TrainedReading(model, partial(torch.optim.SGD, lr=rate))
        read_in_turn([reading], ids, piece)
        yield {"what": f"SGD of all weights, {rate:g}", "rate": rate} | measured(reading, piece)


def hostile(bench: Bench) -> Iterator[dict]:
    """8,192 hostile tokens, then 2,048 of a novel without learning, beside a model that never learned."""
    model = bench.load()
    count, clean, piece = bench.tokens(8192), bench.tokens(2048), piece_of(model)
    ids = bench.ids("novel", count + clean)
    for name, words in hostile_texts(ids[:count], model.config.vocab_size).items():
        readings = frozen_and_learning(model)
        read_in_turn(readings.values(), words, piece)
        for reading in readings.values():
            reading.learn = False
        read_in_turn(readings.values(), ids[count:], piece)
        found = {what: mean(reading.losses[count // piece :]) for what, reading in readings.items()}
        read = mean(readings[LEARNING].losses[: count // piece])
        yield {"what": name, "hostile_loss": read, **found, "above": found[LEARNING] / found[FROZEN] - 1}


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
    learned, rest, piece = bench.tokens(6144), bench.tokens(2048), piece_of(model)
    ids = bench.ids("novel", learned + rest)
    reading, frozen = Reading(model, learn=True), Reading(model)
    read_in_turn([reading, frozen], ids[:learned], piece)
    read_in_turn([frozen], ids[learned:], piece)
    yield {"what": FROZEN, "loss": mean(frozen.losses[learned // piece :])}
    here = again(reading, ids[learned:], piece)
    yield {"what": "not saved", "loss": here}
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMS:
            reading.cache.save_pretrained(Path(folder, form), model, level_dtype=form)
        losses = bench.apart("saved", "--read_on", folder)
        for form in FORMS:
            size = sum(file.stat().st_size for file in Path(folder, form).iterdir())
            found = {"loss": losses[form], "difference": losses[form] - here, "file_mb": round(size / MB, 2)}
            yield {"what": form} | found


def read_on(bench: Bench, folder: Path) -> dict[str, float]:
    """What the new process of `saved` measures: the loss after each saved form."""
    model, losses = bench.load(), {}
    learned, rest = bench.tokens(6144), bench.tokens(2048)
    for form in FORMS:
        reading = Reading(model)
        reading.cache = HopeCache.from_pretrained(folder / form, model)
        read_in_turn([reading], bench.ids("novel", learned + rest)[learned:], piece_of(model))
        losses[form] = mean(reading.losses)
    return losses
