"""The nine tasks of the paper's table of language models, and its row."""

import math

from .result import Row

# lm-eval's task -> the columns of the table: name, lm-eval's metric, and whether it is one of the accuracies.
COLUMNS = {
    "wikitext": [("wiki ppl", "word_perplexity", False)],
    "lambada_openai": [("lambada ppl", "perplexity", False), ("lambada acc", "acc", True)],
    "piqa": [("piqa acc", "acc", True)],
    "hellaswag": [("hellaswag acc_n", "acc_norm", True)],
    "winogrande": [("winogrande acc", "acc", True)],
    "arc_easy": [("arc-e acc", "acc", True)],
    "arc_challenge": [("arc-c acc_n", "acc_norm", True)],
    "social_iqa": [("siqa acc", "acc", True)],
    "boolq": [("boolq acc", "acc", True)],
}
# The name of all nine together, and the paper's name of one.
ALIASES = {"paper": tuple(COLUMNS), "siqa": ("social_iqa",)}


def written_out(tasks: list[str]) -> list[str]:
    """The names with the aliases replaced, each once. Raises ValueError for `all`: lm-eval has thousands."""
    if "all" in tasks:
        raise ValueError("--tasks all is no task: write paper for the nine of the paper, or name tasks of lm-eval.")
    return list(dict.fromkeys(name for task in tasks for name in ALIASES.get(task, (task,))))


def paper_row(rows: list[Row]) -> Row | None:
    """The paper's row from zero_shot's rows, accuracies in percent; None where a task is missing.

    `average` is the mean of the eight accuracies, with the standard error of independent ones.
    """
    found = {(row["task"], row["metric"]): row for row in rows}
    columns = [(name, (task, metric), counts) for task in COLUMNS for name, metric, counts in COLUMNS[task]]
    if not all(key in found for _, key, _ in columns):
        return None
    row = {name: found[key]["value"] * (100 if counts else 1) for name, key, counts in columns}
    averaged = [found[key] for _, key, counts in columns if counts]
    row["average"] = 100 * math.fsum(one["value"] for one in averaged) / len(averaged)
    errors = [one["value_stderr"] for one in averaged]
    row["average_stderr"] = None if None in errors else 100 * math.hypot(*errors) / len(errors)
    return row
