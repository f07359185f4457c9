"""Classes learned from examples in the context alone: the weights stay, the model's own state carries them."""

import random
from collections import Counter

from ..display import progress
from ..streams import frozen_memories
from ..subject import Subject
from .classes import ClassGroups, Example, first_of_each_class
from .labels import choose, context_of, label_of, read
from .matrix import Hits, Matrix

SHOTS = 1


def learn_in_context(subject: Subject, groups: ClassGroups, shots: int, rows: int, seed: int, name: str) -> Matrix:
    """Read `shots` examples of every class, group after group; answer questions after each group.

    Controls: `joint`, the same examples in a drawn order, and for a model with memories `frozen`, which keeps them at
    their initial state. Raises ValueError for a model whose positions do not hold the examples.
    """
    shown = [_examples(groups, group, shots) for group in range(len(groups.names))]
    everything = [example for part in shown for example in part]
    _require_room(subject, groups, everything)
    shuffled = random.Random(f"joint {seed}").sample(everything, len(everything))
    cache, hits, controls = read(subject, [subject.start]), [], {}
    with progress(None, name, len(shown) + 1 + subject.has_memory) as bar:
        for index, part in enumerate(shown):
            cache = read(subject, _tokens(subject, groups, part), cache)
            hits.append(questions(subject, cache, groups, index + 1, rows))
            bar.update()
        cache = read(subject, [subject.start, *_tokens(subject, groups, shuffled)])
        controls["joint"] = questions(subject, cache, groups, len(shown), rows)
        bar.update()
        if subject.has_memory:
            with frozen_memories(subject.model):
                cache = read(subject, [subject.start, *_tokens(subject, groups, everything)])
                controls["frozen"] = questions(subject, cache, groups, len(shown), rows)
            bar.update()
    return Matrix(groups.names, [len(one) for one in groups.classes], hits, controls)


def questions(subject: Subject, cache, groups: ClassGroups, seen: int, rows: int) -> Hits:
    """Which test examples of the first `seen` groups are right, among the classes of these groups."""
    labels = groups.labels[: groups.classes[seen - 1].stop]
    candidates = [label_of(subject, label) for label in labels]
    hits = []
    for test in groups.test[:seen]:
        answers = choose(subject, cache, [context_of(subject, example) for example in test], candidates, rows)
        hits.append([float(answer == example.label) for answer, example in zip(answers, test, strict=True)])
    return hits


def _examples(groups: ClassGroups, group: int, shots: int) -> list[Example]:
    """The first `shots` of every class of a group, in the group's order."""
    found = first_of_each_class(groups.train[group], shots)
    if len(found) < shots * len(groups.classes[group]):
        fewest = min(Counter(example.label for example in found).values())
        raise ValueError(f"--num_fewshot {shots} is more than the {fewest} examples that a class has: lower it.")
    return found


def _tokens(subject: Subject, groups: ClassGroups, examples: list[Example]) -> list[int]:
    parts = ((context_of(subject, one), label_of(subject, groups.labels[one.label])) for one in examples)
    return [token for context, label in parts for token in (*context, *label)]


def _require_room(subject: Subject, groups: ClassGroups, examples: list[Example]):
    bound = subject.longest_input
    if bound is None:
        return
    longest = max(len(context_of(subject, example)) for test in groups.test for example in test)
    need = 1 + len(_tokens(subject, groups, examples)) + longest
    need += max(len(label_of(subject, label)) for label in groups.labels)
    if need > bound:
        raise ValueError(
            f"The examples of all classes and a question take {need:,} tokens, and the model has {bound:,} positions "
            "(max_position_embeddings): lower --num_fewshot, or leave the in-context task out of --tasks."
        )
