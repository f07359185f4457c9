"""Files that come with the package: `hope-hf recipes` and `hope-hf launch-files` list and copy them.

A wheel holds them. In a clone `hope_hf/recipes` and `hope_hf/accelerate_configs` are links to the folders at the top.
"""

import os
import shutil
from pathlib import Path

from .flags import Checked, check_output
from .parser import Parser, nearest
from .program import printed, program

RECIPES = "recipes"
LAUNCH_FILES = "accelerate_configs"


def packaged_files(kind: str) -> dict[str, Path]:
    """The YAML files of `RECIPES` or `LAUNCH_FILES`, by their names in that folder."""
    folder = Path(__file__).parents[1] / kind
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.yaml"))}


def find_file(name: str | Path, kind: str) -> str | Path:
    """The file that a user names: their own or, if there is none, the package's, with or without its folder.

    A name of neither is returned as it is; the caller says that it cannot be read.
    """
    if os.path.exists(name):
        return name
    name_in_folder = str(name).removeprefix(f"{kind}/")
    return packaged_files(kind).get(name_in_folder, name)


@program
def recipes(argv: list[str]) -> int:
    """Returns 0, or 2 after a mistake of the user."""
    return _list_or_copy(argv, "recipes", RECIPES, "hope-hf train NAME [flags] trains by a recipe.")


@program
def launch_files(argv: list[str]) -> int:
    """Returns 0, or 2 after a mistake of the user."""
    use = "accelerate launch --config_file FILE -m hope_hf train ... launches by a copy."
    return _list_or_copy(argv, "launch-files", LAUNCH_FILES, use)


def make_parser(command: str, use: str = "") -> Parser:
    """All flags of one of the two commands; `use`: a sentence on what the files are for."""
    parser = Parser(
        (),
        prog=f"hope-hf {command}",
        description=f"List the {command.replace('-', ' ')} that come with the package, or copy one. {use}",
        example=f"hope-hf {command} --copy {'pilot' if command == 'recipes' else 'ddp'}.yaml",
        link="docs/distributed.md",
        allow_abbrev=False,
    )
    parser.add_argument("--copy", metavar="NAME", action=Checked, help="copy this one")
    parser.add_argument("--to", metavar="DIR", action=Checked, help="its folder (default: the current one)")
    return parser


def _list_or_copy(argv: list[str], command: str, kind: str, use: str) -> int:
    options = make_parser(command, use).parse_args(argv)
    files = packaged_files(kind)
    if options.copy is not None:
        print(_copy(options.copy, files, command, options.to or "."))
        return 0
    if options.to is not None:
        raise ValueError("--to is the folder of a copy: add --copy NAME, or leave it out.")
    width = max(map(len, files)) + 2
    for name, path in files.items():
        # The first line of each file says what it is.
        first, *_ = path.read_text(encoding="utf-8").splitlines()
        print(f"{name:{width}}{first.strip('# :')}")
    print(f"\n{use}\nhope-hf {command} --copy NAME [--to DIR] copies one to change it.")
    return printed()


def _copy(name: str, files: dict[str, Path], command: str, to: str) -> Path:
    if name not in files:
        hint = nearest(name, files) or ":"
        raise ValueError(f"--copy {name} does not exist{hint} hope-hf {command} lists the names.")
    check_output(to, "--to")
    target = Path(to, name)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as copy, files[name].open("rb") as file:
            shutil.copyfileobj(file, copy)
    except FileExistsError:
        raise ValueError(f"--copy: {target} exists: remove it, or name another folder with --to DIR.") from None
    except OSError as error:
        raise ValueError(f"--to {to} cannot be written: {error.strerror}.") from None
    return target
