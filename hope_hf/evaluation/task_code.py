"""Lets no task file of lm-eval run code, unless `--trust_remote_code` is given.

A YAML file names Python functions (`!function`), metrics, prompts, tokenizers and ways to generate that are downloaded
and run, and templates that access Python's internals. lm-eval's own files, which are installed with it, may do all of
this; only other files are checked, also if they include one of these.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import yaml

from hope_hf.cli.files import read_small
from hope_hf.cli.process import one_line
from hope_hf.cli.recipe import PlainLoader

from .templates import limited_environment

FIX = "read that code, then give --trust_remote_code"
# The longest of lm-eval's own files has 62,570 bytes.
LARGEST = 1 << 20
MOST_FILES = 100


class _Code(Exception):
    """What would run."""


def check_files(path: Path, trusted: bool) -> None:
    """Read a task file, and the files that it includes, as lm-eval will.

    Raises ValueError for what cannot be read, and without `trusted` for code from outside of lm-eval.
    """
    pending, seen = [path.resolve()], set()
    while pending:
        file = pending.pop()
        if file in seen or _is_lm_evals(file):
            continue
        seen.add(file)
        if len(seen) > MOST_FILES:
            raise ValueError(f"--tasks {path} includes more than {MOST_FILES} files: write it in fewer.")
        try:
            content = yaml.load(read_small(file, LARGEST), _make_loader(trusted)(file.parent, resolve_funcs=False))
            _check_names(content)
            _refuse_devices(content)
            if not trusted:
                _refuse_code(content)
            pending += _included(file, content)
        except _Code as code:
            raise ValueError(f"--tasks {path} would run {code} ({file.name}): {FIX}.") from None
        except (OSError, yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise ValueError(f"--tasks {path}: {file} cannot be read as a task: {reason}.") from None


@contextmanager
def guarded(trusted: bool) -> Iterator[None]:
    """Inside, lm-eval reads YAML without repeated keys and aliases, and its templates have limits.

    Without `trusted`, a `!function` outside of lm-eval's own files, a template that accesses Python's internals and
    code that comes with a model or tokenizer raise ValueError.
    """
    import lm_eval.utils
    import transformers
    from jinja2.exceptions import SecurityError
    from lm_eval.tasks import _yaml_loader

    def refuse_module(name, *args, **kwargs):
        raise ValueError(f"--tasks would run {name}, code of a model or tokenizer: {FIX}.")

    with ExitStack() as guards:
        guards.enter_context(_replaced(_yaml_loader, "_make_loader", _make_loader(trusted)))
        environment = limited_environment(lm_eval.utils.env, sandboxed=not trusted)
        guards.enter_context(_replaced(lm_eval.utils, "env", environment))
        for module in () if trusted else (transformers.dynamic_module_utils, transformers.generation.utils):
            guards.enter_context(_replaced(module, "get_class_in_module", refuse_module))
        try:
            yield
        except SecurityError as error:
            raise ValueError(f"A template of --tasks would run code ({error}): {FIX}.") from None


@contextmanager
def _replaced(module, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


def _is_lm_evals(file: Path) -> bool:
    import lm_eval

    return file.resolve().is_relative_to(Path(lm_eval.__file__).resolve().parent / "tasks")


def _make_loader(trusted: bool):
    """The function of lm-eval that makes a YAML loader for the files of a folder: its own for its own files alone."""
    from lm_eval.tasks import _yaml_loader

    theirs, function = _yaml_loader._make_loader, _yaml_loader._mk_function_ctor

    def make(base_dir: Path, *, resolve_funcs: bool) -> type[yaml.Loader]:
        if _is_lm_evals(Path(base_dir)):
            return theirs(base_dir, resolve_funcs=resolve_funcs)

        class Loader(PlainLoader):
            pass

        Loader.add_constructor("!function", function(Path(base_dir), resolve_funcs) if trusted else _refuse_function)
        return Loader

    return make


def _refuse_function(loader: yaml.Loader, node: yaml.Node):
    raise _Code(f"the Python function {node.value if isinstance(node, yaml.ScalarNode) else ''}".rstrip())


def _check_names(content: object) -> None:
    """Raise ValueError for names of tasks and groups that lm-eval cannot use: it takes a path for a new task."""
    fields = content if isinstance(content, dict) else {}
    members = fields.get("task", "")
    if not isinstance(members, str | list) or not isinstance(fields.get("group", ""), str):
        raise ValueError("task is no name or list, or group is no name")
    for name in members if isinstance(members, list) else ():
        if isinstance(name, str) and Path(name).suffix in (".yaml", ".yml"):
            raise ValueError(f"its group names the file {name}, and a group has names alone: give the file to --tasks")


def _refuse_devices(content: object) -> None:
    """Raise ValueError where a field names a pipe or a device, on which datasets would wait for ever."""
    for _, value in _entries(content):
        try:
            mode = os.stat(value).st_mode if isinstance(value, str) else stat.S_IFREG
        # Most texts name no file.
        except (OSError, ValueError):
            continue
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise ValueError(f"{value} is no regular file")


def _refuse_code(content: object) -> None:
    """Raise `_Code` for fields with which lm-eval, transformers or datasets run code that they fetch."""
    import lm_eval.api.metrics  # noqa: F401  registers the metrics
    from lm_eval.api.registry import metric_registry

    fetched = {
        "hf_evaluate": "a metric of the package evaluate, which lm-eval would download",
        "use_prompt": "the prompts {}, which can hold code",
        "custom_generate": "the generation code {}",
        "unsafe_code": "the answers of the model",
        # lm-eval's functions load it and trust its code.
        "tokenizer": "the tokenizer {}, which can hold code",
        "pretrained": "the tokenizer {}, which can hold code",
    }
    for key, value in _entries(content):
        if key == "metric" and (not isinstance(value, str) or value not in metric_registry):
            raise _Code(f"the metric {value}, which lm-eval would download")
        if key == "dataset_path" and value == "pandas":
            raise _Code("pickled data (dataset_path: pandas)")
        if key in fetched and value is not None and (value is not False or key == "unsafe_code"):
            raise _Code(fetched[key].format(value))


def _included(file: Path, content: object) -> list[Path]:
    """The files that a task file includes. Raises ValueError for a field that lm-eval could not follow."""
    names = content.get("include", []) if isinstance(content, dict) else []
    names = names if isinstance(names, list) else [names]
    for name in names:
        if not isinstance(name, str) or "\0" in name:
            raise ValueError(f"include: {name!r} is no path")
    return [(file.parent / name).resolve() for name in names]


def _entries(value: object, key: object = None) -> Iterator[tuple[object, object]]:
    """Every key with its value, and every item of a list with the list's key, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _entries(name)
            yield from _entries(item, name)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _entries(item, key)
    else:
        yield key, value
