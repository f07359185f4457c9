"""Two cases beside long texts: classes that come in groups, and a small HOPE that was trained here."""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

import torch

from benchmarks.levels.bench import Bench, compared, piece_of
from benchmarks.levels.reading import Reading
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
    subject = Subject(model, bench.tokenizer)
    everything = ["full_attention"] * model.config.num_hidden_layers
    groups = first_groups(clinc150(bench.data_dir / "cls"))
    groups = groups.shuffled(SEED, TESTS, None)
    fewest, _ = map(bench.tokens, SHOTS)
    for shots in map(bench.tokens, SHOTS):
        shown = [tokens_of(subject, groups, part, shots) for part in groups.train]
        row = {"shots": shots, "tokens": sum(map(len, shown))}
        if shots == fewest:
            whole = bench.load(layer_types=everything, sliding_window=None)
            hits = answers(replace(subject, model=whole), groups, shown)
            yield row | {"what": "in context, full attention"} | accuracies(hits)
        hits = answers(subject, groups, shown)
        yield row | {"what": IN_CONTEXT} | accuracies(hits)
        hits = answers(subject, groups, shown, learn=True)
        yield row | {"what": "learning"} | accuracies(hits)
    trainable = bench.load(dtype=torch.float32).requires_grad_(True)
    tuned = Subject(trainable, bench.tokenizer)
    after_groups, controls = learn_by_fine_tuning(tuned, groups, STEPS, BATCH_SIZE, RATE, ROWS, SEED, "fine-tuning")
    for order, hits in {"sequential": after_groups[-1], "joint": controls["joint"]}.items():
        yield {"what": f"{order} fine-tuning, AdamW {RATE:g}", "rate": RATE} | accuracies(hits)


def first_groups(groups: ClassGroups) -> ClassGroups:
    """The first CLASSES labels of the first GROUPS groups, numbered anew."""
    number = {}
    ranges = []
    for labels in groups.classes[:GROUPS]:
        start = len(number)
        for label in labels[:CLASSES]:
            number[label] = len(number)
        ranges.append(range(start, len(number)))
    return ClassGroups(
        names=groups.names[:GROUPS],
        labels=list(map(groups.labels.__getitem__, number)),
        classes=ranges,
        train=_numbered(groups.train, number),
        test=_numbered(groups.test, number),
    )


def _numbered(groups: list[list[Example]], number: dict[int, int]) -> list[list[Example]]:
    """The examples of the first GROUPS groups that have these labels, with their new numbers."""
    examples_by_group = []
    for examples in groups[:GROUPS]:
        numbered = []
        for example in examples:
            label = number.get(example.label)
            if label is not None:
                numbered.append(replace(example, label=label))
        examples_by_group.append(numbered)
    return examples_by_group


def tokens_of(subject: Subject, groups: ClassGroups, examples: list[Example], shots: int) -> list[int]:
    """`shots` examples of every class with their labels."""
    tokens = []
    for example in first_of_each_class(examples, shots):
        label = groups.labels[example.label]
        tokens += context_of(subject, example)
        tokens += label_of(subject, label)
    return tokens


def answers(subject: Subject, groups: ClassGroups, shown: list[list[int]], learn: bool = False) -> Hits:
    """The hits after all groups of examples have been read, one after the other, and learned."""
    model = subject.model
    cache = read(subject, [subject.start], HopeCache(model.config))
    for tokens in shown:
        if learn:
            model.learn(torch.tensor([tokens]), cache=cache)
        else:
            cache = read(subject, tokens, cache)
    return questions(subject, cache, groups, len(shown), ROWS)


def accuracies(hits: Hits) -> dict:
    """Shares of right answers at the end: mean over the groups, and that of the first group."""
    means = list(map(fmean, hits))
    return {
        "n": sum(map(len, hits)),
        "accuracy": round(sum(means) / len(means), 4),
        "first_group": round(means[0], 4),
        "last_group": round(means[-1], 4),
    }


def own(bench: Bench) -> Iterator[dict]:
    """A small HOPE on held-out text: frozen memories, live ones, and levels that learn at several rates."""
    model = bench.load(dtype=torch.float32)
    config = model.config
    default = config.level_learning or LevelLearning()
    config.level_learning = default
    piece = piece_of(model)
    validation = bench.tokens(4096)
    count = bench.tokens(16_384)
    texts = {
        "wikitext": bench.ids("wikitext", count, skipped=validation),
        "novel": bench.ids("novel", count),
    }
    scaled = {}
    for factor in FACTORS:
        scaled[factor] = replace(default, rate=factor * default.rate, drift=factor * default.drift)
    for name, ids in texts.items():
        yield from compared({FROZEN_MEMORIES: Reading(model, inside=frozen_memories)}, ids, piece, of=name)
        yield from compared({LIVE_MEMORIES: Reading(model)}, ids, piece, of=name)
        for factor, learning in scaled.items():
            config.level_learning = learning
            reading = {f"levels learn, rate x {factor}": Reading(model, learn=True)}
            yield from compared(reading, ids, piece, of=name, rate=learning.rate)
    config.level_learning = default
    rates = [learning.rate for learning in scaled.values()]
    search = learning_rate_search(model, [bench.ids("wikitext", validation)], rates)
    yield {"what": SEARCHED, "rate": search.rate}
