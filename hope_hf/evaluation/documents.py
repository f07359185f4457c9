"""Checks the documents of lm-eval's tasks against what the tasks read, before the model is asked.

If a column is missing, lm-eval uses its name as the text; a label that is not among the choices counts as a wrong
answer.
"""

import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from numbers import Integral

import numpy
import torch
from datasets.table import CastError

from hope_hf.common.process import one_line, warn_once

# Most names of columns that a sentence lists.
MOST_NAMES = 12
MOST_REPEATS = 1_000


class BadDocuments(ValueError):
    """Documents that do not fit their task."""


def check_documents(tasks: Iterable, limit: int | None, num_fewshot: int | None) -> dict[str, float]:
    """Read the first `limit` documents of every task as lm-eval will, without a model.

    `num_fewshot`: the flag's value; tasks that fix 0 ignore it. Returns the chance of a right answer in every task
    with choices. Raises BadDocuments, which names task, file and column, for columns that are missing, labels that
    are not among the choices, and values that are not text.
    """
    from lm_eval.api.task import ConfigurableTask

    chances = {}
    with _same_random_numbers():
        for task in tasks:
            # The columns that the code of other classes reads are not known.
            if isinstance(task, ConfigurableTask):
                own = task.config.num_fewshot
                numbers = _check(task, limit, own if own == 0 or num_fewshot is None else num_fewshot)
                if numbers and task.OUTPUT_TYPE == "multiple_choice":
                    chances[_name(task)] = sum(1 / number for number in numbers) / len(numbers)
    return chances


def reading_failed(error: Exception) -> BadDocuments | None:
    """The sentence for an error that lm-eval raised while it read a task's documents; None for other errors."""
    from lm_eval.api.task import ConfigurableTask

    task, place = None, None
    trace = error.__traceback__
    while trace:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, ConfigurableTask) and getattr(owner, "dataset", None) is not None:
            task, method = owner, trace.tb_frame.f_code.co_name
            if method in ("training_docs", "validation_docs", "test_docs"):
                place = getattr(task.config, method.replace("_docs", "_split")) or place
            if method == "fewshot_docs" or "fs_doc" in trace.tb_frame.f_locals:
                place = _examples(owner)
        trace = trace.tb_next
    if task is None:
        return _different_columns(error)
    if hasattr(task, "task_docs"):
        # lm-eval tries the first document itself.
        try:
            _check(task, 1, None)
        except BadDocuments as better:
            return better
    return BadDocuments(_failure(task, place or _evaluated(task), error))


def _different_columns(error: BaseException | None) -> BadDocuments | None:
    while error and not isinstance(error, CastError):
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    found, wanted = set(error.table_column_names), set(error.requested_column_names)
    names = ", ".join(sorted(map(str, found ^ wanted)))
    return BadDocuments(f"The files of a task of --tasks differ in their columns ({names}): give all the same.")


def _check(task, limit: int | None, shots: int | None) -> list[int]:
    """Check a task; returns the number of choices of every document, if it has choices."""
    split = _evaluated(task)
    read = _columns_read(task)
    for source in [split, _examples(task)] if shots else [split]:
        # If only another file has the column, its values are null here, and a template prints None.
        data = task.dataset[source] if isinstance(task.dataset, dict) and source in task.dataset else None
        for name in sorted(read & set(getattr(data, "column_names", ()))):
            if len(data) and data.data.column(name).null_count == len(data):
                where = f"--tasks {_name(task)}: {_source(task, source)}"
                raise BadDocuments(f"{where} has no column {name}, which the task reads.")
    repeats = task.config.repeats
    if not isinstance(repeats, int) or not 1 <= repeats <= MOST_REPEATS:
        raise BadDocuments(f"--tasks {_name(task)}: repeats is {repeats!r}: give 1 to {MOST_REPEATS:,}.")
    empty, numbers = Counter(), []
    for number, document in enumerate(islice(task.task_docs, limit), 1):
        try:
            text = task.doc_to_text(document)
            choices = None if task.config.doc_to_choice is None else task.doc_to_choice(document)
            target = task.doc_to_target(document)
        except Exception as error:
            raise BadDocuments(_failure(task, split, error, number, document)) from error
        if problem := _problem(task, text, choices, target):
            raise BadDocuments(f"--tasks {_name(task)}: in document {number} of {_source(task, split)} {problem}.")
        if choices is not None:
            numbers.append(len(choices))
        empty.update(name for name in read if name in document and document[name] is None)
    for name, count in empty.items():
        warn_once(f"--tasks {_name(task)}: {count:,} documents of {_source(task, split)} have no {name} (null).")
    return numbers


def _columns_read(task) -> set[str]:
    """The columns that the templates of a task name; those of Python functions are not known."""
    import lm_eval.utils
    from jinja2.meta import find_undeclared_variables

    names = set()
    for field in (task.config.doc_to_text, task.config.doc_to_target, task.config.doc_to_choice):
        if isinstance(field, str):
            names |= {field} if field.isidentifier() else find_undeclared_variables(lm_eval.utils.env.parse(field))
    return names


def _problem(task, text, choices, target) -> str | None:
    config, kind = task.config, task.OUTPUT_TYPE
    is_scored_by_lm_eval = not callable(config.process_results)
    is_choice = kind == "multiple_choice"
    if choices is not None and (not isinstance(choices, list | tuple) or not all(isinstance(c, str) for c in choices)):
        return f"the choices ({_field(config.doc_to_choice)}) are {_short(choices)}, no list of texts"
    if is_choice and not choices:
        return f"the choices ({_field(config.doc_to_choice)}) are empty"
    # lm-eval takes a number instead of a text as the index of the right choice.
    several_texts = isinstance(text, int) and choices is not None
    label, field = (text, config.doc_to_text) if several_texts else (target, config.doc_to_target)
    if is_choice and is_scored_by_lm_eval:
        for one in label if isinstance(label, list) else [label]:
            if not _is_choice(one, choices):
                listed = f"none of {len(choices)} choices ({_short(', '.join(choices))})"
                return _missing(task, field, label) or f"the label ({_field(field)}) is {_short(one)}, {listed}"
    if missing := _missing(task, config.doc_to_text, text):
        return missing
    if not several_texts and not isinstance(text, str):
        return f"the text ({_field(config.doc_to_text)}) is {_short(text)}, no text"
    if not is_choice:
        if missing := _missing(task, config.doc_to_target, target):
            return missing
        if kind.startswith("loglikelihood") and not isinstance(target, str):
            return f"the answer ({_field(config.doc_to_target)}) is {_short(target)}, no text"
    return None


def _is_choice(label, choices: list[str]) -> bool:
    if isinstance(label, str):
        return label in choices
    # A whole number that a table stores as a float counts, too.
    return isinstance(label, Integral | float) and float(label).is_integer() and 0 <= label < len(choices)


def _missing(task, field, value) -> str | None:
    """The sentence for a template that names a missing column, whose name lm-eval would use as the text."""
    if isinstance(field, str) and field.isidentifier() and field not in task.features and value == field:
        return f"there is no column {field} (its columns: {_listed(task.features)})"
    return None


def _failure(task, split: str | None, error: Exception, number: int | None = None, document: object = None) -> str:
    splits = task.dataset if isinstance(task.dataset, dict) else {}
    raw = getattr(splits.get(split), "column_names", [])
    columns = task.features if number else raw or getattr(task, "features", [])
    undefined = re.match(r"'(\w+)' is undefined", str(error))
    name = error.args[0] if isinstance(error, KeyError) and error.args else undefined and undefined[1]
    start = f"--tasks {_name(task)}: {_source(task, split)}"
    if number and (lost := sorted(_columns_read(task) - set(columns))):
        name = lost[0]
    if isinstance(error, KeyError) and splits and name == split:
        return f"{start} has no split {name} (its splits: {_listed(splits)})."
    # The missing key may be a value of the document, looked up in a table of the task's function.
    values = map(str, document.values()) if isinstance(document, dict) else ()
    if isinstance(name, str) and name not in columns and name not in values:
        return f"{start} has no column {name}, which the task reads (its columns: {_listed(columns)})."
    where = f"document {number} of " if number else ""
    reason = f"{type(error).__name__}: {one_line(error)}"
    return f"--tasks {_name(task)} cannot read {where}{_source(task, split)} (columns: {_listed(columns)}): {reason}."


def _evaluated(task) -> str | None:
    return task.config.test_split or task.config.validation_split


def _examples(task) -> str | None:
    config = task.config
    return task.fewshot_cfg.split or config.training_split or config.validation_split or config.test_split


def _source(task, split: str | None) -> str:
    """The file or data set of a task's split, for people."""
    files = (task.config.dataset_kwargs or {}).get("data_files")
    files = files.get(split, files) if isinstance(files, dict) else files
    named = files or [task.config.dataset_path, task.config.dataset_name]
    return " ".join(str(part) for part in (named if isinstance(named, list) else [named]) if part)


def _name(task) -> str:
    return str(task.config.task)


def _field(field) -> str:
    return _short(field) if isinstance(field, str | int) else "of the task"


def _short(value) -> str:
    text = " ".join(str(value if isinstance(value, str) else repr(value)).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(map(str, names[:MOST_NAMES])) + (", ..." if len(names) > MOST_NAMES else "") or "none"


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Restore the random generators afterwards: some functions of tasks draw random numbers."""
    pythons, numpys = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(pythons)
            numpy.random.set_state(numpys)
