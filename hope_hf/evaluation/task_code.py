"""Refuses task files of lm-eval that run code, unless `--trust_remote_code` is given.

A YAML file names Python functions (`!function`), metrics and prompts that are downloaded and run, and templates that
access Python's internals. lm-eval's own files, which are installed with it, may do all of this; only other files are
checked, also if they include one of these.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

FIX = "read that code, then give --trust_remote_code"


class _Loader(yaml.SafeLoader):
    """YAML without Python objects; the name in a `!function` stays a name."""


class _FunctionName(str):
    pass


_Loader.add_constructor("!function", lambda loader, node: _FunctionName(loader.construct_scalar(node)))


def refuse_code(path: Path) -> None:
    """Raise ValueError if a task file, or a file that it includes, runs code from outside of lm-eval."""
    import lm_eval.api.metrics  # noqa: F401  registers the metrics
    from lm_eval.api.registry import metric_registry

    own = Path(lm_eval.__file__).resolve().parent / "tasks"
    pending, seen = [path.resolve()], set()
    while pending:
        file = pending.pop()
        if file in seen or file.is_relative_to(own):
            continue
        seen.add(file)
        try:
            content = yaml.load(file.read_bytes(), _Loader)
        except OSError as error:
            raise ValueError(f"--tasks {path}: {file} cannot be read: {error.strerror}.") from None
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ValueError(f"--tasks {path}: {file} is not YAML: {str(error).splitlines()[0]}.") from None
        for key, value in _entries(content):
            problem = None
            if isinstance(value, _FunctionName):
                problem = f"the Python function {value}"
            elif key == "metric" and value not in metric_registry:
                problem = f"the metric {value}, which lm-eval would download"
            elif key == "hf_evaluate" and value:
                problem = "a metric of the package evaluate, which lm-eval would download"
            elif key == "use_prompt" and value:
                problem = f"the prompts {value}, which can hold code"
            if problem:
                raise ValueError(f"--tasks {path} would run {problem} ({file.name}): {FIX}.")
        included = content.get("include", []) if isinstance(content, dict) else []
        pending += [(file.parent / name).resolve() for name in ([included] if isinstance(included, str) else included)]


def _entries(value: object, key: object = None) -> Iterator[tuple[object, object]]:
    """Every key with its value, and every item of a list with the list's key, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _entries(name)
            yield from _entries(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item, key)
    else:
        yield key, value


@contextmanager
def sandboxed_templates():
    """Inside, a template of lm-eval that accesses Python's internals raises ValueError."""
    import lm_eval.utils
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import SandboxedEnvironment

    free = lm_eval.utils.env
    safe = SandboxedEnvironment(
        loader=free.loader, undefined=free.undefined, keep_trailing_newline=free.keep_trailing_newline
    )
    safe.filters |= free.filters
    lm_eval.utils.env = safe
    try:
        yield
    except SecurityError as error:
        raise ValueError(f"A template of --tasks would run code ({error}): {FIX}.") from None
    finally:
        lm_eval.utils.env = free
