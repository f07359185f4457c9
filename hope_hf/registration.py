"""Registers HOPE when it is first needed: `import hope_hf` alone suffices for the Auto classes, and takes no seconds.

`registered.py` does it, and imports torch and the models. It is imported

1. when transformers looks for the model type "hope" (`AutoConfig`, and through it every Auto class);
2. after a module of the model, such as that of a pickled config in another process;
3. when a public name of the package is used.

For the first two a finder of Python's import system waits for modules, as `importlib.util.LazyLoader` does.
"""

import sys
import threading
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MODEL_TYPE = "hope"
# Where transformers keeps its classes by model type.
AUTO = "transformers.models.auto.configuration_auto"
# Whoever imports a module whose name begins so can make a model.
MODEL = ("hope_hf.model.", "hope_hf.fast", "hope_hf.registered")

_lock = threading.RLock()


def register_on_use() -> None:
    """Wait for the first use; see the module."""
    sys.meta_path.insert(0, _Watch())
    if AUTO in sys.modules:
        _announce()


def _register() -> None:
    # One thread imports; the others wait here, where they hold no module that it needs.
    with _lock:
        import hope_hf.registered  # noqa: F401  importing registers


def _register_unless_another_thread_does() -> None:
    # This thread holds the module that it has just imported, for which the other one may wait.
    if _lock.acquire(blocking=False):
        try:
            _register()
        finally:
            _lock.release()


def _announce() -> None:
    """Add the model type to those that transformers knows, without its class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # `CONFIG_MAPPING.register` takes a class, and the model cannot be imported now: transformers itself may be half
    # imported.
    CONFIG_MAPPING._extra_content = _Entries(CONFIG_MAPPING._extra_content)


class _Entries(dict):
    """Config classes by model type, those of other packages than transformers. HOPE's is imported at its first use."""

    def __init__(self, others: dict[str, type]):
        super().__init__({MODEL_TYPE: None, **others})

    def __getitem__(self, model_type: str) -> type:
        if super().__getitem__(model_type) is None:
            _register()
        return super().__getitem__(model_type)

    def __setitem__(self, model_type: str, config_class: type) -> None:
        # A user's class replaces HOPE's own, which therefore comes first.
        if model_type == MODEL_TYPE:
            _register()
        super().__setitem__(model_type, config_class)

    def values(self):
        _register()
        return super().values()

    def items(self):
        _register()
        return super().items()


class _Watch(MetaPathFinder):
    """Finds the modules above as Python's other finders do, and gives them a loader that acts afterwards."""

    def find_spec(self, name: str, path=None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != AUTO and not name.startswith(MODEL):
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                kind = _AutoLoader if name == AUTO else _ModelLoader
                spec.loader = kind(spec.loader)
                return spec
        return None


class _AutoLoader(Loader):
    """The loader of transformers' table, which then knows the model type."""

    def __init__(self, loader: Loader):
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._follow()

    def _follow(self) -> None:
        _announce()


class _ModelLoader(_AutoLoader):
    """The loader of a module of the model, after which the model is registered."""

    _nested = threading.local()

    def exec_module(self, module: ModuleType) -> None:
        self._nested.depth = depth = getattr(self._nested, "depth", 0) + 1
        try:
            super().exec_module(module)
        finally:
            self._nested.depth = depth - 1

    def _follow(self) -> None:
        # After the outermost of nested imports no module is half executed.
        if self._nested.depth == 1:
            _register_unless_another_thread_does()
