"""Kernels of GPUs on a CPU, in Triton's interpreter (float32): `make test-kernels` chooses it."""

import builtins
import importlib
import sys

import pytest


class Index(int):
    """A loop's index: the interpreter hands out plain integers, of which kernels ask a dtype."""

    def to(self, _):
        return self


def index_range(*bounds):
    return map(Index, builtins.range(*map(int, bounds)))


def import_interpreted(*names: str) -> None:
    """Import modules of flash-linear-attention, their kernels made for the interpreter.

    The first configuration of every kernel: the search for the fastest needs a GPU.
    """
    autotuner = importlib.import_module("triton.runtime.autotuner")
    made = autotuner.Autotuner.__init__

    def first_only(self, function, names, configs, *args, **kwargs):
        made(self, function, names, configs[:1], *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(autotuner.Autotuner, "__init__", first_only)
        for name in names:
            importlib.import_module(name)
    for loaded, found in sys.modules.items():
        if loaded.startswith("fla.ops."):
            found.range = index_range
