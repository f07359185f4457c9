"""Few traces that stand for those of every batch.

A block's bytes are affine in the rows of a batch, so two batches give every other. A mixer that goes over its text in
rounds of operators takes long: instead of a long text many short ones are traced, whose chunks are recomputed in the
same proportion.
"""

from dataclasses import dataclass, replace

from .allocations import Block, Ends, combined
from .fake import kinds_of_layers
from .launch import Mode, StepOptions
from .tracer import Layer, Tracer

# Rounds by which the longer one of two short texts is longer (`layers.Mixer.rounds`).
MORE_ROUNDS = 4


@dataclass(frozen=True)
class Texts:
    """A batch of `rows` texts of `tokens` tokens."""

    rows: int
    tokens: int

    @property
    def total(self) -> int:
        """Tokens of all texts."""
        return self.rows * self.tokens

    def of_length(self, tokens: int) -> "Texts":
        """Texts of another length with about as many tokens in all."""
        rows = round(self.total / tokens)
        return Texts(max(1, rows), tokens)


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
        texts = Texts(first, tokens)
        block = self._of_batch(layer, texts)
        if rows == first:
            return block
        fixed = self._fixed(layer, texts)
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

    def _of_batch(self, layer: Layer, texts: Texts) -> Block:
        """The bytes for texts that are traced, or that shorter ones stand for.

        More short texts, which have as many tokens in all, need as much but for what each text needs at its ends. That
        grows with the number of texts, so that two such batches show what fewer texts need.
        """
        tokens = texts.tokens
        short, longer = self._short_lengths(layer.kind, tokens)
        if short == tokens:
            return self._trace(layer, texts, tokens)
        many = texts.of_length(short)
        fewer = texts.of_length(longer)
        of_many = self._trace(layer, many, tokens)
        of_fewer = self._trace(layer, fewer, tokens)
        # What one text needs is a straight line over its length.
        along = (tokens - short) / (longer - short)
        of_one = combined((1 - along, of_many), (along, of_fewer))
        if many.total == fewer.total == texts.total:
            share = (many.rows - texts.rows) / (many.rows - fewer.rows)
            block = combined((1 - share, of_many), (share, of_fewer))
        else:
            of_short = texts.rows * (1 - along) / many.rows
            of_longer = texts.rows * along / fewer.rows
            rest = 1 - of_short - of_longer
            fixed = self._fixed(layer, texts)
            block = combined((of_short, of_many), (of_longer, of_fewer), (rest, fixed))
        return replace(block, shared=of_one.shared)

    def _fixed(self, layer: Layer, texts: Texts) -> Block:
        """What does not grow with the rows of a batch."""
        short, _ = self._short_lengths(layer.kind, texts.tokens)
        many = texts.of_length(short)
        more = replace(many, rows=2 * many.rows)
        once = self._trace(layer, many, texts.tokens)
        twice = self._trace(layer, more, texts.tokens)
        return combined((2, once), (-1, twice))

    def _short_lengths(self, kind: str, tokens: int) -> tuple[int, int]:
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
            of_short = self._trace(layer, Texts(1, short), short)
            of_longer = self._trace(layer, Texts(1, longer), longer)
            self._is_compiled[kind] = of_short.operators == of_longer.operators
        return self._is_compiled[kind]

    def _trace(self, layer: Layer, texts: Texts, tokens: int) -> Block:
        """Texts that stand for texts of `tokens` tokens: as large a share of chunks is recomputed."""
        config = self._config
        recomputed = getattr(config, "recompute_chunks", None)
        if texts.tokens < tokens:
            chunks = -(-texts.tokens // config.memory_chunk_size)
            of_chunks = -(-tokens // config.memory_chunk_size)
            if 0 < recomputed < of_chunks:
                share = chunks / of_chunks
                recomputed = max(1, round(recomputed * share))
        return self.tracer.block(layer, texts.rows, texts.tokens, recomputed)


def _rounds_by_kind(config) -> dict:
    """`layers.Mixer.rounds` by kind of layer; None for other architectures."""
    kinds = kinds_of_layers(config)
    rounds = dict.fromkeys(kinds)
    if config.model_type == "hope":
        for kind, mixer in zip(kinds, config.mixers, strict=True):
            rounds[kind] = mixer.rounds(config)
    return rounds
