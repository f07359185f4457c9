"""README and docs are correct: blocks run, and flags, files, functions and links exist."""

import argparse
import os
import re
import subprocess
import sys
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
from hope_hf.plan import flags as plan
from hope_hf.retain import run as retain
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
    "hope-hf retain": retain.make_parser,
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


def blocks(page: str, language: str) -> list[tuple[int, str]]:
    """Line number and text of each block of a language; shell blocks name none."""
    text, found = text_of(page), []
    for block in FENCE.finditer(text):
        if block[1] == language:
            found.append((text[: block.start(2)].count("\n"), block[2]))
    return found


def commands(page: str) -> list[str]:
    """Every line of the shell blocks, with what `\\` continues joined, and every span of code in the prose."""
    shell = "".join(block for _, block in blocks(page, "")).replace("\\\n", " ")
    lines = [line.split(" #")[0].strip() for line in shell.splitlines()]
    return lines + re.findall(r"`([^`]+)`", FENCE.sub("", text_of(page)))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:Calling register_constant:FutureWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run_in_order(page, tiny_model, word_tokenizer, tmp_path, monkeypatch):
    for folder, learning in (("runs/demo", None), ("smollm2-hope", {})):
        tiny_model(level_learning=learning).save_pretrained(tmp_path / folder)
        word_tokenizer.save_pretrained(tmp_path / folder)
    (tmp_path / "book.txt").write_text("w1 w2 w3")
    monkeypatch.chdir(tmp_path)
    namespace = {}
    for line, source in blocks(page, "python"):
        # Empty lines in front, so that a traceback names the page's line.
        exec(compile("\n" * line + source, str(ROOT / page), "exec"), namespace)


def options(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a parser and of its commands."""
    flags = set()
    for action in parser._actions:
        flags |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                flags |= options(command)
    return flags


def flags_of(program: str) -> set[str]:
    """The flags of a program as it is named in a command, such as run_clm.py or `hope-hf export`."""
    program = DOORS.get(program, program)
    if program in PARSERS:
        return options(PARSERS[program]())
    # A benchmark's parser is made in the program or in a module that it imports.
    text = text_of(program)
    for name in re.findall(r"from benchmarks\.([\w.]+) import", text):
        text += text_of(f"benchmarks/{name.replace('.', '/')}.py")
    return set(re.findall(r'"(--\w+)"', text))


def programs_and_flags(command: str) -> list[tuple[str, str]]:
    """Every flag of a command with the program of ours (or accelerate) that it belongs to."""
    found, program = [], None
    words = command.split()
    for index, word in enumerate(words):
        if word == "accelerate" or re.fullmatch(r"(run_clm|run_eval|benchmarks/\w+)\.py", word):
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
def test_every_flag_of_a_command_and_every_named_file_exist(page):
    folders = re.compile(r"(?<![\w/.])(?:tests|docs|benchmarks|hope_hf|accelerate_configs|\.ci)/[\w./*-]*")
    missing = []
    for command in commands(page):
        for program, flag in programs_and_flags(command):
            if flag not in flags_of(program):
                missing.append(f"{program} {flag}")
        for name in folders.findall(command):
            # A recipe calls the file to write NAME.
            if "NAME" not in name and not list(ROOT.glob(name)):
                missing.append(name)
    assert not missing


def test_every_flag_in_the_prose_exists_somewhere():
    known = {f"--{name}" for name in NO_EFFECT}
    for program in (*PARSERS, *(f"benchmarks/{path.name}" for path in (ROOT / "benchmarks").glob("*.py"))):
        known |= flags_of(program)
    named = {}
    for page in CURRENT:
        named |= {command.split()[0]: page for command in commands(page) if command.startswith("--")}
    assert named.keys() <= known


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


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


def test_every_page_that_the_package_names_exists():
    pages = set()
    for file in (ROOT / "hope_hf").rglob("*.py"):
        pages.update(re.findall(r"docs/[\w/]+\.md(?:#[\w-]+)?", file.read_text(encoding="utf-8")))
    for page in pages:
        name, _, anchor = page.partition("#")
        assert (ROOT / name).exists() and (not anchor or anchor in anchors(ROOT / name)), page


@pytest.mark.processes
def test_the_site_is_built_without_a_warning(tmp_path):
    """A page that mkdocs.yml does not list, a dead link or a dead anchor is a warning."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "Convert a pretrained Llama" in (tmp_path / "index.html").read_text()
