"""Few traces that stand for those of every batch.

A block's bytes are affine in the rows of a batch, so two batches give every other. A mixer that goes over its text in
rounds of operators takes long: instead of a long text many short ones are traced, whose chunks are recomputed in the
same proportion.
"""

from dataclasses import replace

from .allocations import Block, Ends, combined
from .fake import kinds_of_layers
from .launch import Mode, StepOptions
from .tracer import Layer, Tracer

# Rounds by which the longer one of two short texts is longer (`layers.Mixer.rounds`).
MORE_ROUNDS = 4


class Batches:
    """The parts of a model in one mode, for any batch of `rows` texts of `tokens` tokens."""

    def __init__(self, config, options: StepOptions, mode: Mode, part: str):
        """`part`: what is recomputed (`Recomputed.part`)."""
        self.mode = mode
        self.tracer = Tracer(config, options, mode, part)
        self._config = config
        self._rounds = _rounds_by_kind(config)
        self._is_compiled: dict[str, bool] = {}
        # By tokens of a text, the rows that were asked for first.
        self._first_rows: dict[int, int] = {}

    def block(self, layer: Layer, rows: int, tokens: int) -> Block:
        """The bytes of a block.

        Traced for the first number of rows that is asked for; twice as many show what does not grow with them.
        """
        first = self._first_rows.setdefault(tokens, rows)
        block = self._of_batch(layer, first, tokens)
        if rows == first:
            return block
        fixed = self._fixed(layer, first, tokens)
        times = rows / first
        return combined((times, block), (1 - times, fixed))

    def ends(self, rows: int, tokens: int, in_place: bool) -> Ends:
        """The bytes of the ends; `in_place` as in `as_if_real`.

        A loss without whole logits goes over many tokens in chunks of at most D; eight chunks give all others.
        """
        width = self._config.hidden_size
        few = -(-4 * width // tokens)
        if rows <= 2 * few:
            return self.tracer.ends(rows, tokens, in_place)
        start = self.tracer.ends(few, tokens, in_place)
        end = self.tracer.ends(2 * few, tokens, in_place)
        more = rows / few - 1
        return combined((1 - more, start), (more, end))

    def _of_batch(self, layer: Layer, rows: int, tokens: int) -> Block:
        """The bytes for texts that are traced, or that shorter ones stand for.

        More short texts, which have as many tokens in all, need as much but for what each text needs at its ends. That
        grows with the number of texts, so that two such batches show what fewer texts need.
        """
        short, longer = self._short_texts(layer.kind, tokens)
        if short == tokens:
            return self._trace(layer, rows, tokens, tokens)
        many = _rows_of(short, rows, tokens)
        fewer = _rows_of(longer, rows, tokens)
        of_many = self._trace(layer, many, short, tokens)
        of_fewer = self._trace(layer, fewer, longer, tokens)
        # What one text needs is a straight line over its length.
        along = (tokens - short) / (longer - short)
        shared = combined((1 - along, of_many), (along, of_fewer)).shared
        if many * short == fewer * longer == rows * tokens:
            share = (many - rows) / (many - fewer)
            block = combined((1 - share, of_many), (share, of_fewer))
        else:
            fixed = self._fixed(layer, rows, tokens)
            of_short = rows * (1 - along) / many
            of_longer = rows * along / fewer
            rest = 1 - of_short - of_longer
            block = combined((of_short, of_many), (of_longer, of_fewer), (rest, fixed))
        return replace(block, shared=shared)

    def _fixed(self, layer: Layer, rows: int, tokens: int) -> Block:
        """What does not grow with the rows of a batch."""
        short, _ = self._short_texts(layer.kind, tokens)
        rows = _rows_of(short, rows, tokens)
        once = self._trace(layer, rows, short, tokens)
        twice = self._trace(layer, 2 * rows, short, tokens)
        return combined((2, once), (-1, twice))

    def _short_texts(self, kind: str, tokens: int) -> tuple[int, int]:
        """The lengths of two texts that stand for texts of `tokens` tokens; `tokens` itself where it is short."""
        rounds = self._rounds[kind]
        if rounds is None:
            return tokens, tokens
        short, tokens_of_round = rounds
        longer = short + MORE_ROUNDS * tokens_of_round
        is_short = tokens <= longer
        if is_short or self.mode.on_cpu and self._takes_as_long(kind, short, longer):
            return tokens, tokens
        return short, longer

    def _takes_as_long(self, kind: str, short: int, longer: int) -> bool:
        """Whether a block runs as many operators for a longer text: compiled code goes over its rounds by itself."""
        if kind not in self._is_compiled:
            layer = Layer(kind)
            of_short = self._trace(layer, 1, short, short)
            of_longer = self._trace(layer, 1, longer, longer)
            self._is_compiled[kind] = of_short.operators == of_longer.operators
        return self._is_compiled[kind]

    def _trace(self, layer: Layer, rows: int, tokens: int, whole: int) -> Block:
        """Texts that stand for texts of `whole` tokens: as large a share of chunks is recomputed."""
        recomputed = getattr(self._config, "recompute_chunks", None)
        if tokens < whole:
            size = self._config.memory_chunk_size
            chunks = -(-tokens // size)
            chunks_of_whole = -(-whole // size)
            if 0 < recomputed < chunks_of_whole:
                share = chunks / chunks_of_whole
                recomputed = max(1, round(recomputed * share))
        return self.tracer.block(layer, rows, tokens, recomputed)


def _rows_of(short: int, rows: int, tokens: int) -> int:
    """How many short texts have about as many tokens as `rows` texts of `tokens` tokens."""
    return max(1, round(rows * tokens / short))


def _rounds_by_kind(config) -> dict:
    """`layers.Mixer.rounds` by kind of layer; None for other architectures."""
    kinds = kinds_of_layers(config)
    rounds = dict.fromkeys(kinds)
    if config.model_type == "hope":
        for kind, mixer in zip(kinds, config.mixers, strict=True):
            rounds[kind] = mixer.rounds(config)
    return rounds
