"""Sentences with labels that come in groups: CLINC150 by domain and Banking77, from the files of their authors."""

import csv
import json
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from hope_hf.common.files import read_small
from hope_hf.common.process import one_line

DATA_SETS = ("clinc150", "banking77")
BANKING_GROUPS = 7
# Per group and test example: 1.0 for a right answer, else 0.0.
Hits = list[list[float]]


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

        def draw(kind: str, group: int, examples: list[Example]) -> list[Example]:
            return random.Random(f"{kind} {group} {seed}").sample(examples, len(examples))

        train = [draw("train", group, examples) for group, examples in enumerate(self.train)]
        test = [
            first_of_each_class(draw("test", group, examples), samples_per_class)[:limit]
            for group, examples in enumerate(self.test)
        ]
        return ClassGroups(self.names, self.labels, self.classes, train, test)


def first_of_each_class(examples: list[Example], count: int) -> list[Example]:
    """At most the first `count` examples of every class, in their order."""
    met, found = Counter(), []
    for example in examples:
        if met[example.label] < count:
            met[example.label] += 1
            found.append(example)
    return found


def open_groups(name: str, folder: Path, seed: int) -> ClassGroups:
    """A data set of `DATA_SETS`; `seed` draws groups where the authors give none."""
    return clinc150(folder) if name == "clinc150" else banking77(folder, seed)


def clinc150(folder: Path) -> ClassGroups:
    """150 intents in ten domains (Larson et al. 2019): clinc150_full.json and clinc150_domains.json."""
    domains_file, file = folder / "clinc150_domains.json", folder / "clinc150_full.json"
    domains = _read(domains_file, _domains)
    train, test = _read(file, lambda text: [_pairs(json.loads(text)[split]) for split in ("train", "test")])
    return _grouped(domains_file, domains, {f"{file}, split train,": train, f"{file}, split test,": test})


def banking77(folder: Path, seed: int) -> ClassGroups:
    """77 intents (Casanueva et al. 2020) in seven drawn groups: banking77_train.csv and banking77_test.csv."""
    files = [folder / f"banking77_{split}.csv" for split in ("train", "test")]
    train, test = (_read(file, _csv_rows) for file in files)
    labels = sorted({label for _, label in train})
    drawn = random.Random(f"banking77 {seed}").sample(labels, len(labels))
    size = max(1, -(-len(drawn) // BANKING_GROUPS))
    domains = {f"{start + 1}-{start + size}": drawn[start : start + size] for start in range(0, len(drawn), size)}
    return _grouped(files[0], domains, {str(files[0]): train, str(files[1]): test})


def _domains(text: str) -> dict[str, list[str]]:
    domains = {name: list(labels) for name, labels in json.loads(text).items()}
    labels = [label for members in domains.values() for label in members]
    if not all(domains.values()) or not all(isinstance(label, str) for label in labels):
        raise ValueError("a group is not a list of labels")
    if len(set(labels)) < len(labels):
        raise ValueError("a label stands twice")
    return domains


def _csv_rows(text: str) -> list[tuple[str, str]]:
    return _pairs((row["text"], row["category"]) for row in csv.DictReader(text.splitlines(keepends=True)))


def _pairs(rows: Iterable) -> list[tuple[str, str]]:
    pairs = [tuple(row) for row in rows]
    if not all(len(pair) == 2 and all(isinstance(word, str) for word in pair) for pair in pairs):
        raise ValueError("a row is not a sentence and its label")
    return pairs


def _read(path: Path, parse: Callable):
    try:
        return parse(read_small(path))
    except FileNotFoundError:
        raise ValueError(f"--data_dir {path.parent} has no {path.name}: copy the data set's file there.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise ValueError(f"--data_dir: {path} cannot be read, copy it again: {one_line(error)}.") from None


def _grouped(file: Path, domains: dict[str, list[str]], splits: dict[str, list[tuple[str, str]]]) -> ClassGroups:
    """`file`: the file that names the groups. `splits`: file -> rows, train before test."""
    if len(domains) < 2:
        raise ValueError(f"--data_dir: {file} has fewer than two groups of classes: forgetting needs two or more.")
    labels = [label for members in domains.values() for label in members]
    ends = list(accumulate(map(len, domains.values())))
    classes = [range(start, end) for start, end in pairwise([0, *ends])]
    number = {label: index for index, label in enumerate(labels)}
    for where, rows in splits.items():
        found = {label for _, label in rows}
        if strange := sorted(found - set(labels)):
            raise ValueError(f"--data_dir: {where} has a label without a group, {strange[0]!r}: add it to one.")
        if unused := sorted(set(labels) - found):
            raise ValueError(f"--data_dir: {where} has no example of the label {unused[0]!r}: add one.")
    examples = [[Example(text, number[label]) for text, label in rows] for rows in splits.values()]
    by_group = [[[one for one in split if one.label in members] for members in classes] for split in examples]
    return ClassGroups(list(domains), [label.replace("_", " ") for label in labels], classes, *by_group)
