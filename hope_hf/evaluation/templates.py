"""Jinja templates of lm-eval's tasks, with limits: what a template can compute is not known before it is rendered."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

# CPU time and memory of one rendering, which takes a millisecond in lm-eval's own tasks.
SECONDS = 5.0
ROOM = 1 << 30
LONGEST_TEXT = 1 << 24
# Python multiplies whole numbers of any length without looking at signals.
MOST_BITS = 100_000


class TooCostly(ValueError):
    """A template that takes more than the limits."""


class _OutOfTime(BaseException):
    """No Exception: jinja2 catches these where it computes constants in advance."""


def limited_environment(theirs, sandboxed: bool):
    """lm-eval's environment with limits on time, memory and length, and in jinja2's sandbox if asked for.

    A rendering beyond them raises TooCostly; in the sandbox, one that accesses Python's internals SecurityError.
    """
    from jinja2 import Environment, Template
    from jinja2.sandbox import SandboxedEnvironment

    class Limited(Template):
        def render(self, *args, **kwargs) -> str:
            with _limits():
                text = super().render(*args, **kwargs)
            if len(text) > LONGEST_TEXT:
                raise TooCostly(f"A template of --tasks makes a text of {len(text):,} characters: shorten it.")
            return text

    class Sandbox(SandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context, operator, left, right):
            _check_bits(operator, left, right)
            return super().call_binop(context, operator, left, right)

    class Limiting(Sandbox if sandboxed else Environment):
        template_class = Limited

        @lru_cache(maxsize=256)  # noqa: B019  the environment lives as long as one suite
        def from_string(self, source):
            with _limits():
                return super().from_string(source)

    options = {name: getattr(theirs, name) for name in ("loader", "undefined", "keep_trailing_newline")}
    environment = Limiting(**options)
    environment.filters |= theirs.filters
    environment.filters["round"] = _bounded_round(environment.filters["round"])
    return environment


def _check_bits(operator: str, left, right):
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MOST_BITS:
            raise TooCostly(f"A template of --tasks computes a number of {bits:,} bits: simplify it.")


def _bounded_round(theirs):
    def bounded(value, precision=0, *args, **kwargs):
        if abs(precision) > MOST_BITS:
            raise TooCostly(f"A template of --tasks rounds to {precision:,} digits: lower it.")
        return theirs(value, precision, *args, **kwargs)

    return bounded


@contextmanager
def _limits() -> Iterator[None]:
    """Raise TooCostly where the block takes more than `SECONDS` of CPU time or `ROOM` bytes; Linux has both limits.

    Signals reach the main thread alone.
    """

    def stop(*_):
        raise _OutOfTime

    timed = hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread()
    if timed:
        before = signal.signal(signal.SIGVTALRM, stop)
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)
    try:
        with _memory_limit():
            yield
    except _OutOfTime:
        raise TooCostly(f"A template of --tasks takes more than {SECONDS:g} seconds: simplify it.") from None
    except MemoryError:
        raise TooCostly(f"A template of --tasks takes more than {ROOM >> 20:,} MiB: simplify it.") from None
    finally:
        if timed:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            signal.signal(signal.SIGVTALRM, before)


@contextmanager
def _memory_limit() -> Iterator[None]:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    # Not Linux.
    except (ImportError, OSError):
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = pages * resource.getpagesize() + ROOM
    if soft == resource.RLIM_INFINITY or most < soft:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))
    try:
        yield
    finally:
        with suppress(ValueError):
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
