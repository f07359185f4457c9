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
    places = {}
    for module, names in modules.items():
        places |= dict.fromkeys(names, module)

    def get(name: str) -> object:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(f"{package}.{places[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *places})

    return get, names_of_package
