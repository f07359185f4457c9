"""Selects lm-eval's tasks: by name, by YAML file, or by name with the user's local copies of their data."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from pathlib import Path

from transformers import dynamic_module_utils

from hope_hf.common.files import at_home
from hope_hf.common.parser import nearest
from hope_hf.common.process import one_line
from hope_hf.common.recipe import yaml_fields
from hope_hf.data import cache_for, plain_name

from .documents import check_documents, problem_of_first_document
from .flags import Arguments, names
from .result import CannotRun, Row

# Name of a group whose members' fields lm-eval merges into its tasks; the group itself is not reported.
LOCAL = "local data"
FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
SPLITS = ("training_split", "validation_split", "test_split", "fewshot_split")
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
# `paper` names all nine tasks; `siqa` is the paper's name for one of them.
ALIASES = {"paper": tuple(COLUMNS), "siqa": ("social_iqa",)}


def find_tasks(args: Arguments):
    """lm-eval's task manager, and the list of `tasks` for `lm_eval.simple_evaluate`.

    Raises ValueError for unknown names, missing files, and files that are not trusted; the manager's `load`
    raises it for tasks that cannot be loaded.
    """
    chosen = names("paper" if args.tasks is None else args.tasks)
    if not chosen:
        raise ValueError("--tasks names none of lm-eval's tasks: name some, such as piqa, or write paper.")
    chosen = list(map(at_home, written_out(chosen)))
    files = list(filter(_is_file, chosen))
    for name in files:
        _check_file(name, args)
    # A copy, since `load` is replaced below.
    manager = copy(_listed(len(files) < len(chosen), args.tokenizer_name or args.model_name_or_path))
    for name in chosen:
        if name not in files and name not in manager.task_index:
            raise ValueError(f"--tasks {name} is not a task of lm-eval{nearest(name, manager.all_tasks, most=3)}")
    if args.data_dir is not None:
        chosen = [_on_local_data(manager, name, Path(args.data_dir), args) for name in chosen]
        place = f" from --data_dir {args.data_dir}"
    # The fault may be in the file or in the data that it names.
    elif files:
        place = ""
    else:
        place = " from the Hub's cache (--offline)" if args.offline else " from the Hub"
    _load_in_sentences(manager, args, place)
    return manager, chosen


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml")


def _check_file(name: str, args: Arguments) -> None:
    """ValueError for a file that is not trusted or that lm-eval would not read as a task or group.

    Nothing in it is constructed or run.
    """
    if not Path(name).is_file():
        raise ValueError(f"--tasks {name} does not exist: name a task of lm-eval or a YAML file of one.")
    # Functions, metrics, prompts, templates and tokenizers in a file are code, or name code that is downloaded.
    if not args.trust_remote_code:
        raise ValueError(
            f"--tasks {name} is no task of lm-eval's own, and a task file can run code: read it and the files "
            "that it includes, then give --trust_remote_code."
        )
    fields = yaml_fields(name, f"--tasks {name}")
    if fields is None:
        raise ValueError(f"--tasks {name} holds no task of lm-eval: write its fields as 'name: value'.")
    if fields.get("include", "") is None:
        raise ValueError(f"--tasks {name}: its include is not a path: name a file.")
    if fields.get("task", "") is None or fields.get("group", "") is None:
        raise ValueError(f"--tasks {name}: its task or group is not a name: write one.")
    if "group" in fields and isinstance(fields.get("task"), list):
        for member in fields["task"]:
            if _is_file(member):
                raise ValueError(
                    f"--tasks {name}: its group names the file {member}, and a group holds names alone: give the "
                    "file to --tasks."
                )


@lru_cache(maxsize=4)
def _listed(include_defaults: bool, pretrained: str | None):
    """lm-eval's task manager. Its own tasks take half a minute to list, so it is made once."""
    from lm_eval.tasks import TaskManager

    # Some tasks (RULER) cut their texts with the model's tokenizer.
    return TaskManager(include_defaults=include_defaults, metadata={"pretrained": pretrained})


@contextmanager
def without_foreign_code(trusted: bool) -> Iterator[None]:
    """Inside, without `trusted`, code that comes with a model or tokenizer raises ValueError.

    Some of lm-eval's tasks (RULER) load the model's tokenizer and trust its code.
    """

    def refuse(name, *args, **kwargs):
        raise ValueError(
            f"--tasks would run {name}, code of a model or tokenizer: read that code, then give --trust_remote_code."
        )

    theirs = dynamic_module_utils.get_class_in_module
    dynamic_module_utils.get_class_in_module = theirs if trusted else refuse
    try:
        yield
    finally:
        dynamic_module_utils.get_class_in_module = theirs


def _on_local_data(manager, name: str, folder: Path, args: Arguments) -> dict:
    """A group of the task, or of the tasks that share the tag `name`, reading the folder's files."""
    if not os.path.isdir(folder):
        raise ValueError(f"--data_dir {folder} is not a folder.")
    if name in manager.all_tags:
        members = sorted(manager.task_index[name].tags)
    elif name in manager.all_subtasks:
        members = [name]
    else:
        raise ValueError(f"--data_dir cannot serve {name}, a group or a file: name single tasks of lm-eval.")
    tasks = []
    for task in members:
        tasks.append({"task": task, **overrides(task, manager.task_index[task].cfg, folder, args)})
    return {"group": f"{LOCAL}: {name}", "task": tasks}


def overrides(name: str, config: dict, folder: Path, args: Arguments) -> dict:
    """The fields of lm-eval's task that make it read its documents from `folder/<task>_<split>.jsonl`.

    `config`: lm-eval's own. Each split that is read needs its file: the evaluated one and, with examples in the
    context, the one they are drawn from. Raises ValueError for the first missing file.
    """
    if "dataset_path" not in config or "custom_dataset" in config:
        raise ValueError(f"--data_dir cannot serve {name}: this task of lm-eval makes its documents by code.")
    examples = config.get("fewshot_config") or {}
    evaluated = config.get("test_split") or config["validation_split"]
    needed = [evaluated]
    shots = config.get("num_fewshot")
    # lm-eval keeps a 0 that the task sets.
    if shots != 0 and args.num_fewshot is not None:
        shots = args.num_fewshot
    if shots and "samples" not in examples:
        candidates = [examples.get("split"), config.get("fewshot_split"), *map(config.get, SPLITS)]
        needed.append(next(filter(None, candidates)))
    suffix = _suffix(folder / f"{name}_{evaluated}")
    files = {}
    for split in needed:
        file = folder / f"{name}_{split}{suffix}"
        if not file.is_file():
            raise ValueError(
                f"--data_dir {folder} has no {file.name}: lm-eval's task {name} reads its split {split}, "
                "as .jsonl, .json or .parquet."
            )
        files[split] = plain_name(str(file))
    fields = {key: config[key] if config.get(key) in files else None for key in SPLITS}
    if examples.get("split") and examples["split"] not in files:
        fields["fewshot_config"] = {**examples, "split": None}
    return {
        "dataset_path": FORMATS[suffix],
        "dataset_name": None,
        "dataset_kwargs": {"data_files": files, "cache_dir": cache_for(files.values())},
        **fields,
    }


def _suffix(path: Path) -> str:
    """The ending of the file that is there; .jsonl if there is none."""
    for suffix in FORMATS:
        if path.with_name(path.name + suffix).is_file():
            return suffix
    return ".jsonl"


def _load_in_sentences(manager, args: Arguments, place: str):
    """Make the manager's `load` raise a one-sentence error with `place`: tasks run their own code on the data."""
    load = manager.load

    # The network, or an archive that the Hub no longer has.
    is_from_hub = args.data_dir is None and not args.offline and place

    def load_or_say(tasks):
        try:
            loaded = load(tasks)
        except Exception as error:
            problem = problem_of_first_document(error)
            if problem:
                raise problem from error
            reason = f"{type(error).__name__}: {one_line(error)}"
            sentence = f"--tasks {args.tasks or 'paper'} cannot be loaded{place}: {reason}"
            raise (CannotRun if is_from_hub else ValueError)(sentence) from error
        manager.chances = check_documents(loaded["tasks"].values(), args.limit, args.num_fewshot)
        return loaded

    manager.load = load_or_say


def written_out(tasks: list[str]) -> list[str]:
    """The names with the aliases replaced, each once. Raises ValueError for `all`: lm-eval has thousands."""
    if "all" in tasks:
        raise ValueError("--tasks all is no task: write paper for the nine of the paper, or name tasks of lm-eval.")
    names = []
    for task in tasks:
        names += ALIASES.get(task, (task,))
    return list(dict.fromkeys(names))


def paper_row(rows: list[Row]) -> Row | None:
    """The paper's row from zero_shot's rows, accuracies in percent; None if a task is missing.

    `average` is the mean of the eight accuracies, with the standard error of independent ones.
    """
    by_metric = {(row["task"], row["metric"]): row for row in rows}
    table = {}
    accuracies = []
    errors = []
    for task, columns in COLUMNS.items():
        for name, metric, is_accuracy in columns:
            row = by_metric.get((task, metric))
            if row is None:
                return None
            table[name] = row["value"]
            if is_accuracy:
                table[name] *= 100
                accuracies.append(row["value"])
                errors.append(row["value_stderr"])
    table["average"] = 100 * math.fsum(accuracies) / len(accuracies)
    table["average_stderr"] = None if None in errors else 100 * math.hypot(*errors) / len(errors)
    return table
