"""Rules of the project, checked in the sources: allowed imports, nothing pickled, public names frozen.

Every rule is a function `(file, tree) -> breaches`; `test_every_rule_can_be_broken` shows each one a source that it
must refuse. A new file in a known room needs no change here; a new room or public name is added below.
"""

import ast
import pkgutil
import re
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from transformers.dynamic_module_utils import get_imports

import hope_hf

ROOT = Path(__file__).parents[1]

# What the files of a room (folder) may import besides the standard library; "hope_hf" means its public names.
ROOMS = {
    "hope_hf_main.py": {
        "hope_hf", "hope_hf.training", "hope_hf.evaluation", "hope_hf.chat", "hope_hf.plan", "hope_hf.data",
        "hope_hf.convert", "hope_hf.export", "hope_hf.common", "hope_hf.retain",
    },
    "hope_hf/__main__.py": {"hope_hf_main"},
    "run_clm.py": {"hope_hf.training"},
    "hope_hf/__init__.py": {"hope_hf.interrupt", "hope_hf.lazy", "hope_hf.registration", "hope_hf.registered"},
    "hope_hf/lazy.py": set(),
    "hope_hf/registered.py": {"transformers", "hope_hf.fast", "hope_hf.frozen", "hope_hf.model"},
    "hope_hf/registration.py": {"transformers", "hope_hf.registered"},
    "hope_hf/fast": {"torch", "transformers", "hope_hf.model", "hope_hf.fast"},
    "hope_hf/frozen.py": {"torch", "transformers"},
    "hope_hf/interrupt.py": set(),
    "hope_hf/reference.py": {"torch"},
    # exported to the Hub unchanged: transformers installs huggingface_hub and safetensors, nothing else is there
    "hope_hf/model": {"torch", "transformers", "huggingface_hub", "safetensors", "hope_hf.model"},
    "hope_hf/optim": {"torch", "hope_hf.optim"},
    "hope_hf/data": {
        "torch", "datasets", "transformers", "tokenizers", "numpy", "huggingface_hub", "pyarrow", "tqdm",
        "hope_hf.common", "hope_hf.data", "hope_hf.lazy",
    },
    "hope_hf/common": {
        "torch", "transformers", "tokenizers", "accelerate", "datasets", "huggingface_hub", "safetensors", "tqdm",
        "yaml", "hope_hf.common", "hope_hf.interrupt",
    },
    "run_eval.py": {"hope_hf.evaluation"},
    "hope_hf/evaluation": {
        "torch", "transformers", "datasets", "numpy", "tqdm", "yaml",
        "hope_hf", "hope_hf.frozen", "hope_hf.common", "hope_hf.data", "hope_hf.optim", "hope_hf.evaluation",
    },
    "hope_hf/export": {
        "torch", "transformers", "huggingface_hub", "safetensors", "hope_hf.common", "hope_hf.export", "hope_hf.lazy",
    },
    "hope_hf/convert": {
        "torch", "transformers", "accelerate", "huggingface_hub", "numpy", "safetensors", "tokenizers",
        "hope_hf", "hope_hf.common", "hope_hf.convert", "hope_hf.lazy",
    },
    "hope_hf/retain": {
        "torch", "transformers", "huggingface_hub",
        "hope_hf", "hope_hf.common", "hope_hf.data", "hope_hf.lazy", "hope_hf.retain",
    },
    "hope_hf/chat": {
        "torch", "transformers", "tqdm", "hope_hf", "hope_hf.common", "hope_hf.data", "hope_hf.chat",
    },
    "hope_hf/plan": {
        "torch", "transformers", "accelerate", "yaml",
        "hope_hf", "hope_hf.common", "hope_hf.data", "hope_hf.lazy", "hope_hf.optim", "hope_hf.plan",
    },
    "hope_hf/training": {
        "accelerate", "torch", "transformers", "datasets", "huggingface_hub", "numpy", "safetensors", "yaml", "tqdm",
        "hope_hf", "hope_hf.common", "hope_hf.interrupt", "hope_hf.optim", "hope_hf.data", "hope_hf.export",
        "hope_hf.plan", "hope_hf.training",
    },
}  # fmt: skip

# The rooms by floor: each imports from lower floors and itself alone, so no imports go round in a circle.
FLOORS = (
    {
        "hope_hf/frozen.py",
        "hope_hf/interrupt.py",
        "hope_hf/lazy.py",
        "hope_hf/model",
        "hope_hf/optim",
        "hope_hf/reference.py",
    },
    {"hope_hf/common", "hope_hf/fast"},
    {"hope_hf/registered.py"},
    {"hope_hf/registration.py"},
    {"hope_hf/__init__.py", "hope_hf/data", "hope_hf/export"},
    {"hope_hf/chat", "hope_hf/convert", "hope_hf/evaluation", "hope_hf/plan", "hope_hf/retain"},
    {"hope_hf/training", "run_eval.py"},
    {"run_clm.py", "hope_hf_main.py"},
    {"hope_hf/__main__.py"},
)

# Slow to import or not always installed: only inside functions, and only of these rooms.
LAZY_ROOMS = {"hope_hf/common", "hope_hf/training", "hope_hf/evaluation", "hope_hf/plan"}
LAZY = dict.fromkeys(("matplotlib", "wandb", "evaluate", "lm_eval", "jinja2", "deepspeed"), LAZY_ROOMS)
LAZY |= dict.fromkeys(("fla", "triton"), {"hope_hf/model"}) | {"gguf": {"hope_hf/convert"}, "peft": {"hope_hf/common"}}

PUBLIC = [
    "CACHE_NAME", "PRESETS", "HopeCache", "HopeConfig", "HopeForCausalLM", "HopeForQuestionAnswering",
    "HopeForSequenceClassification", "HopeForTokenClassification", "HopeModel", "HopePreTrainedModel", "LevelLearning",
    "Passage", "__version__", "frozen_memories", "join_passages", "learning_rate_search",
]  # fmt: skip

PICKLES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}


# A copy of the model's code from the Hub takes fast paths where the package is installed.
BORROWED = ("hope_hf/model/backends.py", "hope_hf.fast")


@cache
def files_of_tests() -> list[str]:
    """Every file of the tests, as paths from the repository's root."""
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py"))


@cache
def python_files() -> list[str]:
    """Every source of the package and every program, as paths from the repository's root."""
    files = [*ROOT.glob("*.py"), *(ROOT / "hope_hf").rglob("*.py")]
    return sorted(path.relative_to(ROOT).as_posix() for path in files)


@cache
def tree_of(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"), file)


def room_of(file: str) -> str:
    """The first folder inside the package, or the file itself if it is in none."""
    parts = file.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else file


def imports(file: str, tree: ast.AST):
    """Every import as (node, level of dots, absolute module name, imported names or None)."""
    package = file.removesuffix(".py").split("/")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, 0, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if (file, module) == BORROWED:
                continue
            yield node, node.level, module, [alias.name for alias in node.names]


def inside(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


def imports_only_what_its_room_may(file: str, tree: ast.AST):
    """The table of rooms."""
    allowed = ROOMS[room_of(file)]
    for node, _, module, names in imports(file, tree):
        top = module.split(".")[0]
        if top in sys.stdlib_module_names or any(inside(module, name) for name in allowed - {"hope_hf"}):
            continue
        if module == "hope_hf" and "hope_hf" in allowed:
            yield from (f"{file}:{node.lineno} imports {n}, not public" for n in names or () if n not in PUBLIC)
        elif room_of(file) in LAZY.get(top, ()):
            continue
        else:
            yield f"{file}:{node.lineno} imports {module}"
    for node in ast.walk(tree):
        # after `import hope_hf`
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "hope_hf":
            if node.attr not in PUBLIC:
                yield f"{file}:{node.lineno} uses hope_hf.{node.attr}, not public"


def imported_rooms(file: str, tree: ast.AST):
    """Every import of a room as (node, room)."""
    for node, _, module, _ in imports(file, tree):
        room = "/".join(module.split(".")[:2])
        room = "hope_hf/__init__.py" if room == "hope_hf" else room if room in ROOMS else f"{room}.py"
        if room in ROOMS:
            yield node, room


def imports_only_lower_floors(file: str, tree: ast.AST):
    """No circle between rooms, and no import that runs back up."""
    floor = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    own = room_of(file)
    for node, room in imported_rooms(file, tree):
        if room != own and floor[room] >= floor[own]:
            yield f"{file}:{node.lineno} imports {room}, which is on no lower floor"


FACES = (
    "hope_hf.chat", "hope_hf.convert", "hope_hf.data", "hope_hf.optim", "hope_hf.export", "hope_hf.training",
    "hope_hf.evaluation", "hope_hf.plan",
)  # fmt: skip


def imports_the_faces_of_other_rooms(file: str, tree: ast.AST):
    """Other rooms import only the public face of a room that has one."""
    for node, _, module, _ in imports(file, tree):
        face = next((face for face in FACES if inside(module, face)), module)
        if module != face and room_of(file) != face.replace(".", "/"):
            yield f"{file}:{node.lineno} imports {module}, behind the face of {face}"


def imports_heavy_packages_late(file: str, tree: ast.AST):
    """Plots, trackers and kernels are imported only when they are used."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    late = {id(node) for function in functions for node in ast.walk(function)}
    for node, _, module, _ in imports(file, tree):
        if module.split(".")[0] in LAZY and id(node) not in late:
            yield f"{file}:{node.lineno} imports {module} outside of a function"


def imports_flat_siblings_in_the_model(file: str, tree: ast.AST):
    """transformers copies `from .name import ...` to the Hub, and nothing else."""
    if room_of(file) != "hope_hf/model":
        return
    if file.count("/") > 2:
        yield f"{file} lies in a folder of its own"
    for node, level, module, _ in imports(file, tree):
        if module == "__future__":
            # annotations as strings switch off the configuration's checks, and the model's `config_class`
            yield f"{file}:{node.lineno} imports from __future__"
        if level == 0 and inside(module, "hope_hf"):
            yield f"{file}:{node.lineno} needs the package to be installed"
        if level > 1 or (level == 1 and module.count(".") != 2):
            yield f"{file}:{node.lineno} imports {module}, not a sibling"


def imports_by_name(file: str, tree: ast.AST):
    """Imports and code made from strings cannot be checked here."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            is_late = file == "hope_hf/lazy.py"  # which takes names of modules of the same package alone
            if name in {"__import__", "eval", "exec", "compile"} or name.endswith("import_module") and not is_late:
                yield f"{file}:{node.lineno} calls {name}"
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names):
            yield f"{file}:{node.lineno} imports *"


def pickles_nothing(file: str, tree: ast.AST):
    """A loaded file must not be able to run code."""
    for node, _, module, names in imports(file, tree):
        if {module.split(".")[0], *(names or ())} & PICKLES:
            yield f"{file}:{node.lineno} imports {module}"
        if module in {"torch", "torch.serialization"} and {"load", "save"} & set(names or ()):
            yield f"{file}:{node.lineno} imports load or save from torch"
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if name == "torch.save":
            yield f"{file}:{node.lineno} calls torch.save"
        if name == "torch.load" and options.get("weights_only") != "True":
            yield f"{file}:{node.lineno} calls torch.load without weights_only=True"
        if options.get("allow_pickle", "False") != "False" or options.get("trust_remote_code") == "True":
            yield f"{file}:{node.lineno} lets a file run code"


# Methods that change their object, besides torch's, whose names end with `_`.
CHANGE = set("add append clear discard extend insert pop popitem remove setdefault sort update write".split())


def works_without_asserts(file: str, tree: ast.AST):
    """`python -O` leaves asserts out, and all that they do."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assert):
            continue
        for part in ast.walk(node):
            name = part.func.attr if isinstance(part, ast.Call) and isinstance(part.func, ast.Attribute) else ""
            is_next = isinstance(part, ast.Call) and ast.unparse(part.func) == "next"
            if isinstance(part, ast.NamedExpr) or is_next or name in CHANGE or name.endswith("_"):
                yield f"{file}:{node.lineno} does something inside an assert: {ast.unparse(part)}"


def names_no_machine(file: str, tree: ast.AST):
    """Paths belong to the user's flags."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.search(r"(^|[^\w.])/(work|tmp|home|root|mnt)/", node.value):
                yield f"{file}:{node.lineno} names a path: {node.value!r}"


def imports_no_test(file: str, tree: ast.AST):
    """What several tests need is in conftest.py or a helper, so that a test file can be moved or removed alone."""
    tests = {Path(file).stem for file in files_of_tests() if Path(file).stem.startswith("test_")}
    for node, _, module, names in imports(file, tree):
        found = tests.intersection([*module.split("."), *(names or ())])
        yield from (f"{file}:{node.lineno} imports the test {name}" for name in found)


RULES = [
    imports_only_what_its_room_may,
    imports_only_lower_floors,
    imports_the_faces_of_other_rooms,
    imports_heavy_packages_late,
    imports_flat_siblings_in_the_model,
    imports_by_name,
    pickles_nothing,
    works_without_asserts,
    names_no_machine,
]


def test_every_file_is_examined_and_every_room_known():
    """Counted again by what Python can import, which excludes folders without `__init__.py`."""
    package = {"hope_hf/__init__.py"}
    for module in pkgutil.walk_packages([str(ROOT / "hope_hf")], "hope_hf."):
        package.add(module.name.replace(".", "/") + ("/__init__.py" if module.ispkg else ".py"))
    programs = {path.name for path in ROOT.iterdir() if path.suffix == ".py"}
    assert set(python_files()) == package | programs
    assert {room_of(file) for file in python_files()} == set(ROOMS)
    assert sorted(room for rooms in FLOORS for room in rooms) == sorted(ROOMS)


@pytest.mark.parametrize("rule", [*RULES, imports_no_test], ids=lambda rule: rule.__name__)
def test_sources_keep_the_rule(rule):
    files = files_of_tests() if rule is imports_no_test else python_files()
    assert [breach for file in files for breach in rule(file, tree_of(file))] == []


BROKEN = [
    (imports_only_what_its_room_may, "hope_hf/model/x.py", "import numpy"),
    (imports_only_what_its_room_may, "hope_hf/model/x.py", "from ..optim import LevelClock"),
    (imports_only_what_its_room_may, "hope_hf/optim/x.py", "def f():\n    import accelerate.utils"),
    (imports_only_what_its_room_may, "hope_hf/training/x.py", "from hope_hf.model.cache_hope import HopeCache"),
    (imports_only_what_its_room_may, "hope_hf/training/x.py", "import hope_hf\nhope_hf.model.cache_hope"),
    (imports_only_lower_floors, "hope_hf/plan/x.py", "def f():\n    from hope_hf.training import main"),
    (imports_only_lower_floors, "hope_hf/common/x.py", "from ..data import Data"),
    (imports_the_faces_of_other_rooms, "hope_hf/evaluation/x.py", "from hope_hf.data.files import find_files"),
    (imports_heavy_packages_late, "hope_hf/training/x.py", "class A:\n    from matplotlib import pyplot"),
    (imports_flat_siblings_in_the_model, "hope_hf/model/x.py", "from . import continuum"),
    (imports_flat_siblings_in_the_model, "hope_hf/model/x.py", "from ..reference import Memory"),
    (imports_flat_siblings_in_the_model, "hope_hf/model/x.py", "from hope_hf.model.continuum import LearnedRates"),
    (imports_flat_siblings_in_the_model, "hope_hf/model/kernels/x.py", ""),
    (imports_by_name, "hope_hf/model/x.py", "import importlib\nimportlib.import_module('hope_hf.optim')"),
    (imports_by_name, "hope_hf/data/x.py", "from torch import *"),
    (pickles_nothing, "hope_hf/training/x.py", "def f():\n    import pickle"),
    (pickles_nothing, "hope_hf/training/x.py", "import torch\ntorch.load(path, weights_only=flag)"),
    (pickles_nothing, "hope_hf/data/x.py", "load_dataset(name, trust_remote_code=True)"),
    (works_without_asserts, "hope_hf/data/x.py", "assert (first := rows[0]) == 1"),
    (works_without_asserts, "hope_hf/optim/x.py", "assert gradient.zero_().any()"),
    (names_no_machine, "hope_hf/data/x.py", '"""Reads /tmp/books."""'),
    (imports_no_test, "tests/data/x.py", "from test_loader import batches"),
]


@pytest.mark.parametrize(("rule", "file", "source"), BROKEN, ids=[f"{r.__name__}-{s}" for r, _, s in BROKEN])
def test_every_rule_can_be_broken(rule, file, source):
    assert len(list(rule(file, ast.parse(source)))) == 1
    assert {rule for rule, _, _ in BROKEN} == {*RULES, imports_no_test}


def test_files_of_the_hub_import_nothing_more_without_a_try(tmp_path):
    """transformers refuses a repository if a package that it finds in one of its files so is not installed."""
    everywhere = ROOMS["hope_hf/model"] | sys.stdlib_module_names
    for file in (ROOT / "hope_hf" / "model").glob("*.py"):
        assert set(get_imports(file)) <= everywhere, file.name
    (tmp_path / "x.py").write_text("def f():\n    with g():\n        from fla.modules import conv")
    assert get_imports(tmp_path / "x.py") == ["fla"]


def test_the_lowest_versions_are_those_that_the_package_admits():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    admitted = {re.split(r">=|,", word)[0]: re.split(r">=|,", word)[1] for word in named if ">=" in word}
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    lowest = dict(line.split("==") for line in lines if not line.startswith("#"))
    # 5.17 is 5.17.0
    assert {name: f"{version}.0"[: len(lowest[name])] for name, version in admitted.items()} == lowest


def test_public_names_are_frozen():
    assert sorted(["__version__", *hope_hf.__all__]) == sorted(PUBLIC)
    assert all(hasattr(hope_hf, name) for name in PUBLIC)
