"""How far a window goes: a novel read beyond the length that the model was trained with, with sinks and without."""

from collections.abc import Iterator

from transformers import AutoConfig

from benchmarks.levels.bench import MB, Bench, mean, measured
from benchmarks.levels.reading import Reading, read_in_turn
from benchmarks.measuring import resident_kib
from hope_hf import HopeCache

# Tokens of the texts that SmolLM2 was trained with, and of a piece.
TRAINED, PIECE = 8192, 512
# Tokens of the window, sinks, and tokens read.
WINDOWS = ((512, 4, 65_536), (512, 0, 16_384), (1024, 4, 24_576), (1024, 0, 16_384))


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
