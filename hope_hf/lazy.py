"""Names of a package that are imported when they are first used: a program reads its flags before it imports torch."""

import importlib
import sys
from collections.abc import Callable, Mapping


def late_names(
    package: str, modules: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package (PEP 562).

    Args:
        package: its `__name__`.
        modules: by the name of a module in it, the names that the package takes from there.
    """
    module_of = {}
    for module, names in modules.items():
        module_of |= dict.fromkeys(names, module)

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        path = f"{package}.{module_of[name]}"
        module = importlib.import_module(path)
        value = getattr(module, name)
        # From now on Python finds it without this function.
        setattr(sys.modules[package], name, value)
        return value

    def names_of_package() -> list[str]:
        present = vars(sys.modules[package])
        return sorted({*present, *module_of})

    return get, names_of_package
