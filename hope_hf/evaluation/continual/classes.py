"""Sentences with labels that come in groups: CLINC150 by domain and Banking77, from the files of their authors."""

import csv
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

from hope_hf.cli.mistakes import one_line

BANKING_GROUPS = 7


@dataclass(frozen=True)
class Example:
    """A sentence, and its label as a number in `ClassGroups.labels`."""

    text: str
    label: int


@dataclass(frozen=True)
class ClassGroups:
    """Labels in the order in which a model meets them.

    names: of the groups. labels: words of every class. classes: numbers of the labels of each group. train, test:
    examples of each group.
    """

    names: list[str]
    labels: list[str]
    classes: list[range]
    train: list[list[Example]]
    test: list[list[Example]]

    def shuffled(self, seed: int, limit: int | None) -> "ClassGroups":
        """The examples in an order that `seed` draws; of each group's test at most `limit`."""

        def draw(kind: str, group: int, examples: list[Example]) -> list[Example]:
            return random.Random(f"{kind} {group} {seed}").sample(examples, len(examples))

        train = [draw("train", group, examples) for group, examples in enumerate(self.train)]
        test = [draw("test", group, examples)[:limit] for group, examples in enumerate(self.test)]
        return ClassGroups(self.names, self.labels, self.classes, train, test)


def clinc150(folder: Path) -> ClassGroups:
    """150 intents in ten domains (Larson et al. 2019): clinc150_full.json and clinc150_domains.json."""
    domains = _read(folder / "clinc150_domains.json", _domains)
    train, test = _read(folder / "clinc150_full.json", _splits)
    return _grouped(folder / "clinc150_full.json", domains, train, test)


def banking77(folder: Path) -> ClassGroups:
    """77 intents (Casanueva et al. 2020), by the alphabet in seven groups: banking77_train.csv, banking77_test.csv."""
    train, test = (_read(folder / f"banking77_{split}.csv", _csv_rows) for split in ("train", "test"))
    labels = sorted({label for _, label in train}, key=str.lower)
    size = -(-len(labels) // BANKING_GROUPS)
    domains = {f"{start + 1}-{start + size}": labels[start : start + size] for start in range(0, len(labels), size)}
    return _grouped(folder / "banking77_train.csv", domains, train, test)


def _domains(text: str) -> dict[str, list[str]]:
    return {name: list(labels) for name, labels in json.loads(text).items()}


def _splits(text: str) -> tuple[list, list]:
    splits = json.loads(text)
    return splits["train"], splits["test"]


def _csv_rows(text: str) -> list[tuple[str, str]]:
    return [(row["text"], row["category"]) for row in csv.DictReader(text.splitlines(keepends=True))]


def _read(path: Path, parse: Callable):
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"--data_dir {path.parent} has no {path.name}: copy the data set's file there.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise ValueError(f"--data_dir: {path} cannot be read, copy it again: {one_line(error)}.") from None


def _grouped(path: Path, domains: dict[str, list[str]], train: list, test: list) -> ClassGroups:
    labels = [label for members in domains.values() for label in members]
    ends = list(accumulate(map(len, domains.values())))
    classes = [range(start, end) for start, end in pairwise([0, *ends])]
    number = {label: index for index, label in enumerate(labels)}
    try:
        splits = [[Example(text, number[label]) for text, label in rows] for rows in (train, test)]
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"--data_dir: {path} has a row with an unknown label: {one_line(error)}.") from None
    by_group = [[[one for one in split if one.label in members] for members in classes] for split in splits]
    return ClassGroups(list(domains), [label.replace("_", " ") for label in labels], classes, *by_group)


DATA_SETS = {"clinc150": clinc150, "banking77": banking77}
