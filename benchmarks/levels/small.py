"""Two cases beside long texts: classes that come in groups, and a small HOPE that was trained here."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from benchmarks.levels.bench import Bench, measured, piece_of
from benchmarks.levels.reading import Reading, read_in_turn
from hope_hf import HopeCache, LevelLearning, frozen_memories, learning_rate_search
from hope_hf.evaluation.continual.classes import ClassGroups, Example, Hits, clinc150, first_of_each_class
from hope_hf.evaluation.continual.fine_tuning import learn_by_fine_tuning
from hope_hf.evaluation.continual.in_context import context_of, label_of, questions, read
from hope_hf.evaluation.subject import Subject

GROUPS, CLASSES = 5, 3
# Examples of each class that are read; with the fewer ones, all fit into the trained length of full attention.
SHOTS = (8, 32)
# Test sentences of each class, and rows that the model reads at once.
TESTS, ROWS = 4, 30
# Of fine-tuning: steps for each group, which see as many examples as the longer reading.
STEPS, BATCH_SIZE, RATE = 12, 8, 5e-5
SEED = 0
FACTORS = (1, 4, 10, 40)
IN_CONTEXT, FROZEN_MEMORIES, LIVE_MEMORIES = "in context, window", "frozen memories", "live memories"
SEARCHED = "found by learning_rate_search"


def classes(bench: Bench) -> Iterator[dict]:
    """CLINC150 in five groups of three intents, read group by group; answers by the likelihood of the labels."""
    model = bench.load()
    subject, groups = Subject(model, bench.tokenizer), first_groups(clinc150(bench.data_dir / "cls"))
    groups = groups.shuffled(SEED, TESTS, None)
    whole = {"layer_types": ["full_attention"] * model.config.num_hidden_layers, "sliding_window": None}
    for shots in map(bench.tokens, SHOTS):
        shown = [tokens_of(subject, groups, part, shots) for part in groups.train]
        row = {"shots": shots, "tokens": sum(map(len, shown))}
        if shots == bench.tokens(SHOTS[0]):
            everything = replace(subject, model=bench.load(**whole))
            yield row | {"what": "in context, full attention"} | accuracies(answers(everything, groups, shown))
        yield row | {"what": IN_CONTEXT} | accuracies(answers(subject, groups, shown))
        yield row | {"what": "learning"} | accuracies(answers(subject, groups, shown, learn=True))
    tuned = Subject(bench.load(dtype=torch.float32).requires_grad_(True), bench.tokenizer)
    hits, controls = learn_by_fine_tuning(tuned, groups, STEPS, BATCH_SIZE, RATE, ROWS, SEED, "fine-tuning")
    yield {"what": f"sequential fine-tuning, AdamW {RATE:g}", "rate": RATE} | accuracies(hits[-1])
    yield {"what": f"joint fine-tuning, AdamW {RATE:g}", "rate": RATE} | accuracies(controls["joint"])


def first_groups(groups: ClassGroups) -> ClassGroups:
    """The first CLASSES labels of the first GROUPS groups, numbered anew."""
    kept = [label for part in groups.classes[:GROUPS] for label in list(part)[:CLASSES]]
    number = {label: index for index, label in enumerate(kept)}

    def chosen(parts: list[list[Example]]) -> list[list[Example]]:
        return [[replace(one, label=number[one.label]) for one in part if one.label in number] for part in parts]

    sizes = [len(part[:CLASSES]) for part in groups.classes[:GROUPS]]
    ranges = [range(sum(sizes[:index]), sum(sizes[: index + 1])) for index in range(len(sizes))]
    labels = [groups.labels[label] for label in kept]
    return ClassGroups(
        groups.names[:GROUPS], labels, ranges, chosen(groups.train[:GROUPS]), chosen(groups.test[:GROUPS])
    )


def tokens_of(subject: Subject, groups: ClassGroups, examples: list[Example], shots: int) -> list[int]:
    """`shots` examples of every class with their labels."""
    shown = first_of_each_class(examples, shots)
    parts = ((context_of(subject, one), label_of(subject, groups.labels[one.label])) for one in shown)
    return [token for context, label in parts for token in (*context, *label)]


def answers(subject: Subject, groups: ClassGroups, shown: list[list[int]], learn: bool = False) -> Hits:
    """The hits after all groups of examples have been read, one after the other, and learned."""
    cache = read(subject, [subject.start], HopeCache(subject.model.config))
    for tokens in shown:
        if learn:
            subject.model.learn(torch.tensor([tokens]), cache=cache)
        else:
            cache = read(subject, tokens, cache)
    return questions(subject, cache, groups, len(shown), ROWS)


def accuracies(hits: Hits) -> dict:
    """Shares of right answers at the end: mean over the groups, and that of the first group."""
    means = [sum(one) / len(one) for one in hits]
    return {
        "n": sum(map(len, hits)),
        "accuracy": round(sum(means) / len(means), 4),
        "first_group": round(means[0], 4),
        "last_group": round(means[-1], 4),
    }


def own(bench: Bench) -> Iterator[dict]:
    """A small HOPE on held-out text: frozen memories, live ones, and levels that learn at several rates."""
    model = bench.load(dtype=torch.float32)
    default = model.config.level_learning or LevelLearning()
    model.config.level_learning = default
    piece = piece_of(model)
    searched, count = bench.tokens(4096), bench.tokens(16_384)
    texts = {"wikitext": bench.ids("wikitext", count, searched), "novel": bench.ids("novel", count)}
    scaled = {factor: replace(default, rate=factor * default.rate, drift=factor * default.drift) for factor in FACTORS}
    for name, ids in texts.items():
        readings = {FROZEN_MEMORIES: Reading(model, inside=frozen_memories), LIVE_MEMORIES: Reading(model)}
        for what, reading in readings.items():
            read_in_turn([reading], ids, piece)
            yield {"what": what, "of": name} | measured(reading, piece)
        for factor, fields in scaled.items():
            model.config.level_learning = fields
            reading = Reading(model, learn=True)
            read_in_turn([reading], ids, piece)
            yield {"what": f"levels learn, rate x {factor}", "of": name, "rate": fields.rate} | measured(
                reading, piece
            )
    model.config.level_learning = default
    rates = [fields.rate for fields in scaled.values()]
    yield {"what": SEARCHED, "rate": learning_rate_search(model, [bench.ids("wikitext", searched)], rates).rate}
