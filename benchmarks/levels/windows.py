"""What a window's width is worth, and how far one goes: a novel read beyond the length of the model's training."""

from collections.abc import Iterator

from transformers import AutoConfig

from benchmarks.levels.bench import MB, Bench, mean, measured
from benchmarks.levels.reading import Reading, frozen_and_learning, read_in_turn
from benchmarks.measuring import resident_kib
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
    piece = bench.tokens(PIECE)
    read_in_turn(readings.values(), ids, piece)
    for name, reading in readings.items():
        yield {"what": name, "of": bench.novel.stem} | measured(reading, piece)


def window(bench: Bench) -> Iterator[dict]:
    """Moby Dick with windows; beside the same tokens when the model begins anew every 8K and keeps to what it knows.

    Later text is not as easy as earlier text, so losses are compared on the same tokens: those beyond the first 8K
    that are not within a window of such a beginning.
    """
    trained, piece = bench.tokens(TRAINED), bench.tokens(PIECE)
    layers = ["window_attention"] * AutoConfig.from_pretrained(bench.model).num_hidden_layers
    for size, sinks, tokens in WINDOWS:
        model = bench.load(layer_types=layers, sliding_window=bench.tokens(size), attention_sinks=sinks)
        ids = bench.ids("moby_dick", bench.tokens(tokens))
        through, anew, resident = Reading(model), Reading(model), []
        for start in range(0, len(ids), trained):
            anew.cache = HopeCache(model.config)
            read_in_turn([through, anew], ids[start : start + trained], piece)
            resident.append(round(resident_kib("VmRSS") * 1024 / MB))
        within = bench.tokens(size) // piece
        compared = [i for i in range(trained // piece, len(through.losses)) if i % (trained // piece) >= within]
        losses = {"through": [through.losses[i] for i in compared], "anew": [anew.losses[i] for i in compared]}
        row = {"what": f"window of {size}, {sinks} sinks"} | measured(through, piece) | {"process_mb": resident}
        yield row | {name: mean(values) for name, values in losses.items()}
