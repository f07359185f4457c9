"""README and docs are correct: blocks run, commands, flags, files, functions and links exist, prose is short."""

import argparse
import importlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
from accelerate.commands.launch import launch_command_parser

from hope_hf.chat import flags as chat
from hope_hf.common import packaged
from hope_hf.common.parser import Parser
from hope_hf.common.run_arguments import GROUPS as TRAINING_GROUPS
from hope_hf.common.run_recipe import NO_EFFECT
from hope_hf.convert import run as convert
from hope_hf.data import prepare, tokenizer
from hope_hf.evaluation.flags import GROUPS as EVALUATION_GROUPS
from hope_hf.export import run as export
from hope_hf.plan import parsing as plan
from hope_hf.training.checkpoints import tool
from hope_hf.training.watch import plot

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md"))]
# The decision log keeps the programs, flags and files of its entries' dates.
CURRENT = [page for page in PAGES if not page.startswith("docs/log/")]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PARSERS = {
    "hope-hf": lambda: argparse.ArgumentParser().add_argument("--version").container,
    "hope-hf chat": chat.make_parser,
    "hope-hf checkpoints": tool.make_parser,
    "hope-hf convert": convert.make_parser,
    "hope-hf eval": lambda: Parser(EVALUATION_GROUPS),
    "hope-hf export": export.make_parser,
    "hope-hf generate": chat.make_generate_parser,
    "hope-hf launch-files": lambda: packaged.make_parser("launch-files"),
    "hope-hf plan": plan.make_parser,
    "hope-hf plot": plot.make_parser,
    "hope-hf prepare": prepare.make_parser,
    "hope-hf recipes": lambda: packaged.make_parser("recipes"),
    "hope-hf tokenizer": tokenizer.make_parser,
    "hope-hf train": lambda: Parser(TRAINING_GROUPS),
    "accelerate": launch_command_parser,
}
DOORS = {"run_clm.py": "hope-hf train", "run_eval.py": "hope-hf eval"}
# Other projects' programs, whose flags are not checked.
OTHERS = {"pip", "tensorboard", "wandb", "hf", "lm_eval", "git", "export", "make", "pytest", "torchrun"}


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def python_blocks(page: str) -> list[tuple[int, str]]:
    """Line number and source of each python block."""
    text = text_of(page)
    return [(text[: found.start(2)].count("\n"), found[2]) for found in FENCE.finditer(text) if found[1] == "python"]


def commands(page: str) -> list[str]:
    """Every line of the shell blocks, with what `\\` continues joined, and every span of code in the prose."""
    text = text_of(page)
    shell = "".join(found[2] for found in FENCE.finditer(text) if not found[1]).replace("\\\n", " ")
    lines = [line.split(" #")[0].strip() for line in shell.splitlines()]
    return [line for line in lines if line] + re.findall(r"`([^`]+)`", FENCE.sub("", text))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)])
def test_python_blocks_run_in_order(page, tiny_model, word_tokenizer, tmp_path, monkeypatch):
    for folder, learning in (("runs/demo", None), ("smollm2-hope", {})):
        tiny_model(level_learning=learning).save_pretrained(tmp_path / folder)
        word_tokenizer.save_pretrained(tmp_path / folder)
    (tmp_path / "book.txt").write_text("w1 w2 w3")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for line, source in python_blocks(page):
        # Empty lines in front, so that a traceback names the page's line.
        exec(compile("\n" * line + source, str(ROOT / page), "exec"), namespace)


def test_python_blocks_are_found():
    assert {"README.md", "docs/memory_files.md", "docs/fine_tuning.md", "docs/generation.md"} <= {
        page for page in PAGES if python_blocks(page)
    }


def options(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a parser and of its commands."""
    found = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*map(options, action.choices.values()))
    return found


def flags_of(program: str) -> set[str]:
    """The flags of a program as it is named in a command, such as run_clm.py or `hope-hf export`."""
    program = DOORS.get(program, program)
    if program in PARSERS:
        return options(PARSERS[program]())
    # A benchmark's parser is made in the program or in a module that it imports.
    shared = re.findall(r"from benchmarks\.([\w.]+) import", (ROOT / program).read_text(encoding="utf-8"))
    files = [ROOT / program, *(ROOT / f"benchmarks/{name.replace('.', '/')}.py" for name in shared)]
    return {flag for file in files for flag in re.findall(r'"(--\w+)"', file.read_text(encoding="utf-8"))}


def programs_and_flags(command: str) -> list[tuple[str, str]]:
    """Every flag of a command with the program of ours (or accelerate) that it belongs to."""
    found, program = [], None
    words = command.split()
    for index, word in enumerate(words):
        if word == "accelerate":
            program = word
        elif re.fullmatch(r"(run_clm|run_eval|benchmarks/\w+)\.py", word):
            program = word
        elif word == "hope-hf" or (word == "hope_hf" and words[index - 1] == "-m"):
            program = " ".join(["hope-hf", *words[index + 1 : index + 2]])
            program = program if program in PARSERS else "hope-hf"
        elif word in OTHERS:
            program = None
        elif program and word.startswith("--"):
            found.append((program, word.split("=")[0]))
    return found


@pytest.mark.parametrize("page", CURRENT)
def test_every_flag_exists_in_the_program_that_it_is_given_to(page):
    unknown = [
        (program, flag)
        for command in commands(page)
        for program, flag in programs_and_flags(command)
        if flag not in flags_of(program)
    ]
    assert not unknown


@pytest.mark.parametrize("page", CURRENT)
def test_every_flag_in_the_prose_exists_somewhere(page):
    programs = [*PARSERS]
    programs += [path.relative_to(ROOT).as_posix() for path in (ROOT / "benchmarks").glob("*.py")]
    known = set.union(*map(flags_of, programs)) | {f"--{name}" for name in NO_EFFECT}
    named = {command.split()[0] for command in commands(page) if command.startswith("--")}
    assert named <= known


@pytest.mark.parametrize("page", CURRENT)
def test_every_file_of_the_repository_that_is_named_exists(page):
    folders = r"(?:tests|docs|benchmarks|hope_hf|accelerate_configs|\.ci)"
    named = {word for command in commands(page) for word in re.findall(rf"(?<![\w/.]){folders}/[\w./*-]*", command)}
    # A recipe calls the file to write NAME.
    assert not [name for name in named if "NAME" not in name and not list(ROOT.glob(name))]


@pytest.mark.parametrize("page", CURRENT)
def test_every_test_that_is_named_exists(page):
    named = re.findall(r"(tests/[\w/.]+)::(\w+)", " ".join(commands(page)))
    assert not [test for file, test in named if f"def {test}(" not in (ROOT / file).read_text(encoding="utf-8")]


@pytest.mark.parametrize("page", CURRENT)
def test_every_make_target_exists(page):
    targets = re.findall(r"^([\w-]+)(?: [\w -]+)?:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    targets += ["test-long", "test-gpu", "test-kill"]
    named = [shlex.split(command)[1:] for command in commands(page) if re.match(r"make [\w-]", command)]
    assert not [words[0] for words in named if words[0] not in targets]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_readme_is_read_in_five_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 1200
    assert max(map(len, text.splitlines())) <= 119


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (ROOT / page).parent / name if name else ROOT / page
        if not file.exists() or anchor and anchor not in anchors(file):
            broken.append(target)
    assert not broken


def test_every_function_of_the_table_of_equations_exists():
    rows = [line.split("|")[3] for line in text_of("docs/paper_to_code.md").splitlines() if line.startswith("| ")]
    files = {path.stem: f"hope_hf.model.{path.stem}" for path in (ROOT / "hope_hf/model").glob("*.py")}
    missing = []
    for row in rows[1:]:
        for name in re.findall(r"`([\w.]+)`", row):
            if name.startswith("hope_hf."):
                # module.Class or module.function
                module, _, path = name.rpartition(".")
            elif name.split(".")[0] in files:
                module, _, path = name.partition(".")
            else:
                # in the module of the name before
                path = name
            try:
                attrgetter(path)(importlib.import_module(files.get(module, module)))
            except AttributeError:
                missing.append(name)
    assert len(rows) > 10 and not missing


def test_the_map_of_the_rooms_is_what_its_script_writes():
    page = runpy.run_path(str(ROOT / "docs/rooms.py"))["page_with_map"]()
    assert text_of("CONTRIBUTING.md") == page, "run python docs/rooms.py"


@pytest.mark.parametrize("page", PAGES)
def test_prose_is_wrapped(page):
    assert not [line for line in text_of(page).splitlines() if len(line) > 119 and not line.startswith("|")]


def test_the_index_of_the_log_is_what_its_script_writes():
    script = runpy.run_path(str(ROOT / "docs/log/index.py"))
    assert {path.stem for path in (ROOT / "docs/log").glob("*.md")} == {"README", *script["PAGES"]}
    assert text_of("docs/log/README.md") == script["page_with_index"](), "run python docs/log/index.py"


def test_the_notebook_is_well_formed():
    notebook = json.loads((ROOT / "docs/quickstart.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")


@pytest.mark.processes
def test_the_site_is_built_without_a_warning(tmp_path):
    """A page that mkdocs.yml does not list, a dead link or a dead anchor is a warning."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "Convert a pretrained Llama" in (tmp_path / "index.html").read_text()
    assert (tmp_path / "log/levels/index.html").exists()
