"""A report as single numbers, so that reports can be compared, drawn over tokens and sent to trackers."""

from typing import NamedTuple

# Numbers that say which row it is.
LABELS = frozenset({"length", "depth", "layer", "head", "tokens", "num_fewshot", "step"})
# Numbers that say how much was measured, or what a task is.
COUNTS = frozenset(
    {"n", "documents", "steps", "parameters", "seconds", "keys", "values_per_key", "keys_asked_for", "bytes"}
)


class Key(NamedTuple):
    """Where a number stands in a report."""

    suite: str
    table: str
    row: str
    name: str

    def __str__(self) -> str:
        return "/".join(part for part in self if part)


class Number(NamedTuple):
    """A value and its standard error, where it has one."""

    value: float
    stderr: float | None


def numbers(results: dict[str, dict]) -> dict[Key, Number]:
    """The numbers in `results` of a report, in its order; a row that is called by a metric gives it its name."""
    found = {}
    for suite, result in results.items():
        for table, rows in result["tables"].items():
            for row in rows:
                label = ", ".join(_label(name, value) for name, value in row.items() if _is_label(name, value))
                for name, value in row.items():
                    if _is_number(name, value):
                        called = row.get("metric", name) if name == "value" else name
                        found[Key(suite, table, label, called)] = Number(float(value), row.get(f"{name}_stderr"))
    return found


def _is_label(name: str, value) -> bool:
    # lm-eval's version of a task, and a metric, which names the number.
    return name not in ("version", "metric") and (isinstance(value, str) or (name in LABELS and value is not None))


def _is_number(name: str, value) -> bool:
    return isinstance(value, int | float) and not name.endswith("_stderr") and name not in LABELS | COUNTS


def _label(name: str, value) -> str:
    return value if isinstance(value, str) else f"{name} {value:{'g' if isinstance(value, float) else ','}}"
