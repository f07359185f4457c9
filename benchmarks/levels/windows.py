"""What a window's width is worth, and how far one goes: a novel read beyond the length of the model's training."""

from collections.abc import Iterator

from transformers import AutoConfig

from benchmarks.levels.bench import Bench, compared, mean, measured, process_mb
from benchmarks.levels.reading import Reading, frozen_and_learning, read_in_turn
from hope_hf import HopeCache

# Tokens of the texts that SmolLM2 was trained with, and of a piece.
TRAINED, PIECE = 8192, 512
# Tokens of the window, sinks, and tokens read.
WINDOWS = ((512, 4, 65_536), (512, 0, 16_384), (1024, 4, 24_576), (1024, 0, 16_384))

WIDTHS = (512, 1024)


def widths(bench: Bench) -> Iterator[dict]:
    """16K tokens of the novel with windows of two widths, each frozen and learning, in turn."""
    readings = {}
    for width in WIDTHS:
        model = bench.load(sliding_window=bench.tokens(width))
        for name, reading in frozen_and_learning(model).items():
            readings[f"window of {width}, {name}"] = reading
    ids = bench.ids("novel", bench.tokens(16_384))
    yield from compared(readings, ids, bench.tokens(PIECE), of=bench.novel.stem)


def window(bench: Bench) -> Iterator[dict]:
    """Moby Dick with windows; beside the same tokens when the model begins anew every 8K and keeps to what it knows.

    Later text is not as easy as earlier text, so losses are compared on the same tokens: those beyond the first 8K
    that are not within a window of such a beginning.
    """
    trained = bench.tokens(TRAINED)
    piece = bench.tokens(PIECE)
    layers = ["window_attention"] * AutoConfig.from_pretrained(bench.model).num_hidden_layers
    for size, sinks, tokens in WINDOWS:
        width = bench.tokens(size)
        model = bench.load(layer_types=layers, sliding_window=width, attention_sinks=sinks)
        ids = bench.ids("moby_dick", bench.tokens(tokens))
        through = Reading(model)
        anew = Reading(model)
        resident = []
        for text in ids.split(trained):
            anew.cache = HopeCache(model.config)
            read_in_turn([through, anew], text, piece)
            resident.append(process_mb())
        row = {"what": f"window of {size}, {sinks} sinks"} | measured(through, piece) | {"process_mb": resident}
        pieces = trained // piece
        pieces_of_window = width // piece
        for name, reading in {"through": through, "anew": anew}.items():
            losses = []
            for start in range(pieces, len(reading.losses), pieces):
                losses += reading.losses[start + pieces_of_window : start + pieces]
            row[name] = mean(losses)
        yield row
