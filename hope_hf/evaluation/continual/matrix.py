"""What was known after each group: the matrix R[i][j], and the numbers that sum it up."""

from dataclasses import dataclass
from math import hypot

from ..result import Row, mean_and_stderr

# Per group: 1.0 for every example of the test that was right, else 0.0.
Hits = list[list[float]]


@dataclass(frozen=True)
class Matrix:
    """hits: of group j <= i after group i, among the classes of groups 0 to i. controls: by name, of all groups."""

    groups: list[str]
    classes: list[int]
    hits: list[Hits]
    controls: dict[str, Hits]

    def accuracy(self, i: int, j: int) -> float:
        """R[i][j]."""
        return mean_and_stderr(self.hits[i][j])[0]


def average(hits: Hits) -> tuple[float, float | None]:
    """Mean of the groups' accuracies, and its standard error."""
    means, errors = zip(*map(mean_and_stderr, hits), strict=True)
    return sum(means) / len(means), None if None in errors else hypot(*errors) / len(errors)


def forgetting(matrix: Matrix) -> float:
    """Mean over all groups but the last: the best accuracy before the end less the one at the end."""
    last = len(matrix.groups) - 1
    losses = [max(matrix.accuracy(i, j) for i in range(j, last)) - matrix.accuracy(last, j) for j in range(last)]
    return sum(losses) / last


def backward_transfer(matrix: Matrix) -> float:
    """Mean over all groups but the last: the accuracy at the end less that right after the group."""
    last = len(matrix.groups) - 1
    return sum(matrix.accuracy(last, j) - matrix.accuracy(j, j) for j in range(last)) / last


def rows(matrix: Matrix) -> list[Row]:
    """A row after every group, and one of each control: chance, then the accuracy of each group, and their mean."""
    seen = [sum(matrix.classes[: index + 1]) for index in range(len(matrix.groups))]
    lines = [(name, hits, count) for name, hits, count in zip(matrix.groups, matrix.hits, seen, strict=True)]
    lines += [(name, hits, seen[-1]) for name, hits in matrix.controls.items()]
    found = []
    for name, hits, count in lines:
        means = [mean_and_stderr(one)[0] for one in hits] + [None] * (len(matrix.groups) - len(hits))
        mean, error = average(hits)
        found.append(
            {
                "after": name,
                "n": sum(map(len, hits)),
                "chance": 1 / count,
                **dict(zip(matrix.groups, means, strict=True)),
                "average": mean,
                "average_stderr": error,
            }
        )
    return found


def summary(name: str, matrix: Matrix) -> Row:
    """One row for a task."""
    mean, error = average(matrix.hits[-1])
    row = {
        "task": name,
        "n": sum(map(len, matrix.hits[-1])),
        "chance": 1 / sum(matrix.classes),
        "average_accuracy": mean,
        "average_accuracy_stderr": error,
        "forgetting": forgetting(matrix),
        "backward_transfer": backward_transfer(matrix),
    }
    for control in ("joint", "frozen"):
        if control in matrix.controls:
            row[control], row[f"{control}_stderr"] = average(matrix.controls[control])
        else:
            row[control], row[f"{control}_stderr"] = None, None
    return row
