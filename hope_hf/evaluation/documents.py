"""Checks the documents of lm-eval's tasks against what the tasks read, before the model is asked.

If a column is missing, lm-eval uses its name as the text; a label that is not among the choices counts as a wrong
answer.
"""

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from numbers import Integral

import numpy
import torch

from hope_hf.common.process import one_line, warn_once

# Most names of columns that a sentence lists.
MOST_NAMES = 12
MOST_REPEATS = 1_000


def check_documents(tasks: Iterable, limit: int | None, num_fewshot: int | None) -> dict[str, float]:
    """Read the first `limit` documents of every task as lm-eval will, without a model.

    `num_fewshot`: the flag's value; tasks that fix 0 ignore it. Returns the chance of a right answer in every task
    with choices. Raises ValueError that names task, file and column, for columns that are missing, labels that
    are not among the choices, and values that are not text.
    """
    from lm_eval.api.task import ConfigurableTask

    chances = {}
    with _same_random_numbers():
        for task in tasks:
            # The columns that the code of other classes reads are not known.
            if not isinstance(task, ConfigurableTask):
                continue
            shots = task.config.num_fewshot
            if shots != 0 and num_fewshot is not None:
                shots = num_fewshot
            numbers_of_choices = _check(task, limit, shots)
            if numbers_of_choices and task.OUTPUT_TYPE == "multiple_choice":
                chances_of_documents = [1 / number for number in numbers_of_choices]
                chances[_name(task)] = sum(chances_of_documents) / len(chances_of_documents)
    return chances


def problem_of_first_document(error: Exception) -> ValueError | None:
    """What is wrong with a task's first document, which lm-eval itself tried when it raised `error`; or None."""
    from lm_eval.api.task import ConfigurableTask

    task = None
    trace = error.__traceback__
    while trace:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, ConfigurableTask) and hasattr(owner, "task_docs"):
            task = owner
        trace = trace.tb_next
    if task is None:
        return None
    try:
        _check(task, limit=1, shots=None)
    except ValueError as problem:
        return problem
    return None


def _check(task, limit: int | None, shots: int | None) -> list[int]:
    """Check a task; returns the number of choices of every document, if it has choices."""
    split = _evaluated(task)
    read = _columns_read(task)
    _check_columns(task, split, read)
    if shots:
        _check_columns(task, _examples(task), read)
    repeats = task.config.repeats
    if not isinstance(repeats, int) or not 1 <= repeats <= MOST_REPEATS:
        raise ValueError(f"--tasks {_name(task)}: repeats is {repeats!r}: give 1 to {MOST_REPEATS:,}.")
    empty = Counter()
    numbers_of_choices = []
    for number, document in enumerate(islice(task.task_docs, limit), 1):
        try:
            text = task.doc_to_text(document)
            choices = None
            if task.config.doc_to_choice is not None:
                choices = task.doc_to_choice(document)
            target = task.doc_to_target(document)
        except Exception as error:
            raise ValueError(_failure(task, split, error, number)) from error
        problem = _problem(task, text, choices, target)
        if problem:
            place = f"document {number} of {_source(task, split)}"
            raise ValueError(f"--tasks {_name(task)}: in {place} {problem}.")
        if choices is not None:
            numbers_of_choices.append(len(choices))
        empty.update(name for name in read & document.keys() if document[name] is None)
    source = _source(task, split)
    for name, count in empty.items():
        warn_once(f"--tasks {_name(task)}: {count:,} documents of {source} have no {name} (null).")
    return numbers_of_choices


def _check_columns(task, split: str | None, read: set[str]) -> None:
    """Raise ValueError if a column that is read is null in all of a split: then only another file has it, and a
    template prints None."""
    if not isinstance(task.dataset, dict) or not task.dataset.get(split):
        return
    data = task.dataset[split]
    for name in sorted(read.intersection(data.column_names)):
        if data.data.column(name).null_count == len(data):
            where = f"--tasks {_name(task)}: {_source(task, split)}"
            raise ValueError(f"{where} has no column {name}, which the task reads.")


def _columns_read(task) -> set[str]:
    """The columns that the templates of a task name; those of Python functions are not known."""
    import lm_eval.utils
    from jinja2.meta import find_undeclared_variables

    names = set()
    for field in (task.config.doc_to_text, task.config.doc_to_target, task.config.doc_to_choice):
        if not isinstance(field, str):
            continue
        if field.isidentifier():
            names.add(field)
        else:
            names |= find_undeclared_variables(lm_eval.utils.env.parse(field))
    return names


def _problem(task, text, choices, target) -> str | None:
    """What is wrong with the text, the choices or the answer of a document."""
    config = task.config
    is_choice = task.OUTPUT_TYPE == "multiple_choice"
    # lm-eval takes a number instead of a text as the index of the right choice.
    is_index = isinstance(text, int) and choices is not None
    problem = None
    if choices is not None or is_choice:
        problem = _problem_of_choices(config, choices, is_choice)
    if not problem and is_choice and not callable(config.process_results):
        field, label = (config.doc_to_text, text) if is_index else (config.doc_to_target, target)
        problem = _problem_of_label(task, field, label, choices)
    if not problem:
        problem = _missing(task, config.doc_to_text, text)
    if not problem and not is_index:
        problem = _no_text("text", config.doc_to_text, text)
    if problem or is_choice:
        return problem
    problem = _missing(task, config.doc_to_target, target)
    if not problem and task.OUTPUT_TYPE.startswith("loglikelihood"):
        problem = _no_text("answer", config.doc_to_target, target)
    return problem


def _no_text(part: str, field, value) -> str | None:
    """The sentence for a part of a document that is no text."""
    if isinstance(value, str):
        return None
    return f"the {part} ({_field(field)}) is {_short(value)}, no text"


def _problem_of_choices(config, choices, is_choice: bool) -> str | None:
    subject = f"the choices ({_field(config.doc_to_choice)}) are"
    is_list = choices is None or isinstance(choices, list | tuple)
    if not is_list or not all(isinstance(choice, str) for choice in choices or ()):
        return f"{subject} {_short(choices)}, no list of texts"
    return f"{subject} empty" if is_choice and not choices else None


def _problem_of_label(task, field, label, choices: list[str]) -> str | None:
    """`label`: one, or a list of right ones."""
    labels = label if isinstance(label, list) else [label]
    for one in labels:
        if not _is_choice(one, choices):
            missing = _missing(task, field, label)
            listed = f"none of {len(choices)} choices ({_short(', '.join(choices))})"
            return missing or f"the label ({_field(field)}) is {_short(one)}, {listed}"
    return None


def _is_choice(label, choices: list[str]) -> bool:
    if isinstance(label, str):
        return label in choices
    # A whole number that a table stores as a float counts, too.
    is_whole = isinstance(label, Integral | float) and float(label).is_integer()
    return is_whole and 0 <= label < len(choices)


def _missing(task, field, value) -> str | None:
    """The sentence for a template that names a missing column, whose name lm-eval would use as the text."""
    if isinstance(field, str) and field.isidentifier() and field not in task.features and value == field:
        return f"there is no column {field} (its columns: {_listed(task.features)})"
    return None


def _failure(task, split: str | None, error: Exception, number: int) -> str:
    """The sentence for an error while a task read the document of that number."""
    source = _source(task, split)
    listed = _listed(task.features)
    unknown = sorted(_columns_read(task) - set(task.features))
    if unknown:
        return f"--tasks {_name(task)}: {source} has no column {unknown[0]}, which the task reads (it has {listed})."
    reason = f"{type(error).__name__}: {one_line(error)}"
    return f"--tasks {_name(task)} cannot read document {number} of {source} (columns: {listed}): {reason}."


def _evaluated(task) -> str | None:
    return task.config.test_split or task.config.validation_split


def _examples(task) -> str | None:
    config = task.config
    return task.fewshot_cfg.split or config.training_split or config.validation_split or config.test_split


def _source(task, split: str | None) -> str:
    """The file or data set of a task's split, for people."""
    options = task.config.dataset_kwargs or {}
    files = options.get("data_files")
    if isinstance(files, dict):
        files = files.get(split, files)
    parts = files or [task.config.dataset_path, task.config.dataset_name]
    if not isinstance(parts, list):
        parts = [parts]
    return " ".join(map(str, filter(None, parts)))


def _name(task) -> str:
    return str(task.config.task)


def _field(field) -> str:
    return _short(field) if isinstance(field, str | int) else "of the task"


def _short(value) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text.split())
    return f"{text[:77]}..." if len(text) > 80 else text


def _listed(names: Iterable[str]) -> str:
    names = list(map(str, names))
    if len(names) > MOST_NAMES:
        names = [*names[:MOST_NAMES], "..."]
    return ", ".join(names) or "none"


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
