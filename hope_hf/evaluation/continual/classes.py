"""Sentences with labels that come in groups: CLINC150 by domain and Banking77, from the files of their authors."""

import csv
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path

from hope_hf.common.files import read_small
from hope_hf.common.process import one_line

DATA_SETS = ("clinc150", "banking77")
# Name of a task -> (data set, how its classes are learned).
WAYS = ("in-context", "levels", "fine-tuning")
TASKS = {f"{data_set}-{way}": (data_set, way) for data_set in DATA_SETS for way in WAYS}
BANKING_GROUPS = 7
# Per group and test example: 1.0 for a right answer, else 0.0.
Hits = list[list[float]]
# A sentence and its label.
Pair = tuple[str, str]


@dataclass(frozen=True)
class Example:
    """A sentence, and its label as a number in `ClassGroups.labels`."""

    text: str
    label: int


@dataclass(frozen=True)
class ClassGroups:
    """Labels in the order in which a model meets them.

    names: names of the groups. labels: words of every class. classes: numbers of the labels of each group.
    train, test: examples of each group.
    """

    names: list[str]
    labels: list[str]
    classes: list[range]
    train: list[list[Example]]
    test: list[list[Example]]

    def shuffled(self, seed: int, samples_per_class: int, limit: int | None) -> "ClassGroups":
        """The examples in an order drawn by `seed`; the test examples limited per class and per group."""
        train = []
        test = []
        for group in range(len(self.names)):
            train.append(_drawn(self.train[group], f"train {group} {seed}"))
            drawn = _drawn(self.test[group], f"test {group} {seed}")
            test.append(first_of_each_class(drawn, samples_per_class)[:limit])
        return replace(self, train=train, test=test)


def _drawn(items: list, seed: str) -> list:
    """The items in a random order."""
    return random.Random(seed).sample(items, len(items))


def first_of_each_class(examples: list[Example], count: int) -> list[Example]:
    """At most the first `count` examples of every class, in their order."""
    number_of_class = Counter()
    first = []
    for example in examples:
        number_of_class[example.label] += 1
        if number_of_class[example.label] <= count:
            first.append(example)
    return first


def open_groups(name: str, folder: Path, seed: int) -> ClassGroups:
    """A data set of `DATA_SETS`; `seed` draws groups where the authors give none."""
    return clinc150(folder) if name == "clinc150" else banking77(folder, seed)


def clinc150(folder: Path) -> ClassGroups:
    """150 intents in ten domains (Larson et al. 2019): clinc150_full.json and clinc150_domains.json."""
    domains_file = folder / "clinc150_domains.json"
    file = folder / "clinc150_full.json"
    domains = _read(domains_file, _domains)
    splits = {}
    for split in ("train", "test"):
        splits[f"{file}, split {split},"] = _read(file, partial(_json_rows, split=split))
    return _grouped(domains_file, domains, splits)


def banking77(folder: Path, seed: int) -> ClassGroups:
    """77 intents (Casanueva et al. 2020) in seven drawn groups: banking77_train.csv and banking77_test.csv."""
    train_file = folder / "banking77_train.csv"
    test_file = folder / "banking77_test.csv"
    train = _read(train_file, _csv_rows)
    test = _read(test_file, _csv_rows)
    labels = _drawn(sorted({label for _, label in train}), f"banking77 {seed}")
    size = max(1, math.ceil(len(labels) / BANKING_GROUPS))
    domains = {}
    for start in range(0, len(labels), size):
        end = start + size
        domains[f"{start + 1}-{end}"] = labels[start:end]
    return _grouped(train_file, domains, {str(train_file): train, str(test_file): test})


def _domains(text: str) -> dict[str, list[str]]:
    domains = json.loads(text)
    labels = []
    for members in domains.values():
        if not isinstance(members, list) or set(map(type, members)) != {str}:
            raise ValueError("a group is not a list of labels")
        labels += members
    if len(set(labels)) < len(labels):
        raise ValueError("a label stands twice")
    return domains


def _json_rows(text: str, split: str) -> list[Pair]:
    return _pairs(json.loads(text)[split])


def _csv_rows(text: str) -> list[Pair]:
    rows = csv.DictReader(text.splitlines(keepends=True))
    return _pairs(map(itemgetter("text", "category"), rows))


def _pairs(rows: Iterable) -> list[Pair]:
    pairs = []
    for row in rows:
        pair = tuple(row)
        if list(map(type, pair)) != [str, str]:
            raise ValueError("a row is not a sentence and its label")
        pairs.append(pair)
    return pairs


def _read(path: Path, parse: Callable):
    try:
        return parse(read_small(path))
    except FileNotFoundError:
        raise ValueError(f"--data_dir {path.parent} has no {path.name}: copy the data set's file there.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise ValueError(f"--data_dir: {path} cannot be read, copy it again: {one_line(error)}.") from None


def _grouped(file: Path, domains: dict[str, list[str]], splits: dict[str, list[Pair]]) -> ClassGroups:
    """`file`: the file that names the groups. `splits`: file -> rows, train before test."""
    if len(domains) < 2:
        raise ValueError(f"--data_dir: {file} has fewer than two groups of classes: forgetting needs two or more.")
    classes = []
    words = []
    for members in domains.values():
        classes.append(range(len(words), len(words) + len(members)))
        words += [label.replace("_", " ") for label in members]
    train, test = (_by_group(split, rows, domains) for split, rows in splits.items())
    return ClassGroups(list(domains), words, classes, train, test)


def _by_group(split: str, rows: list[Pair], domains: dict[str, list[str]]) -> list[list[Example]]:
    """The rows of a split as examples of each group. ValueError for a label of no group, or one without a row."""
    number_of_label = {}
    group_of_label = {}
    examples = []
    for members in domains.values():
        group = []
        examples.append(group)
        for label in members:
            number_of_label[label] = len(number_of_label)
            group_of_label[label] = group
    unused = set(number_of_label)
    for text, label in rows:
        if label not in number_of_label:
            raise ValueError(f"--data_dir: {split} has a label without a group, {label!r}: add it to one.")
        unused.discard(label)
        group_of_label[label].append(Example(text, number_of_label[label]))
    if unused:
        raise ValueError(f"--data_dir: {split} has no example of the label {min(unused)!r}: add one.")
    return examples
