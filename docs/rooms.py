"""Write the map of the rooms into CONTRIBUTING.md, from the imports: `python docs/rooms.py`. A test compares them."""

import ast
import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = ["hope_hf_main.py", "run_clm.py", "run_eval.py"]
BLOCK = re.compile(r"(<!-- rooms -->\n).*(<!-- end -->)", re.DOTALL)


def files_of(room: str) -> list[Path]:
    """The sources of a program, of a folder of the package, or of a file in it."""
    if room in PROGRAMS:
        return [ROOT / room]
    path = ROOT / "hope_hf" / room
    return [path] if path.suffix else sorted(path.rglob("*.py"))


def imported(room: str, rooms: list[str]) -> set[str]:
    """The rooms that a room imports, inside functions too. The package's public names are the model's."""
    found = set()
    for file in files_of(room):
        package = file.relative_to(ROOT).parts[:-1]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                names = [".".join([*base, node.module or ""]).rstrip(".")]
            for name in names:
                top, _, rest = name.partition(".")
                if top == "hope_hf":
                    part = rest.split(".")[0] or "model"
                    found |= {part, f"{part}.py"} & set(rooms)
    if room == "model":
        # a copy of the model's code takes the fast paths of an installed package
        found.discard("fast")
    return found - {room}


def purpose(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))).split("\n\n")[0]
    return re.match(r"(.*?)(?:[.;] |[.:]?$)", " ".join(text.split()))[1] + "."


def diagram() -> str:
    """Floors from top to bottom: a room imports rooms of lower floors alone."""
    folders = [path.name for path in sorted((ROOT / "hope_hf").iterdir()) if (path / "__init__.py").exists()]
    rooms = [*PROGRAMS, *folders, "frozen.py", "interrupt.py", "reference.py"]
    arrows = {room: imported(room, rooms) for room in rooms}

    def floor(room: str) -> int:
        return 1 + max(map(floor, arrows[room]), default=0)

    lines = []
    for number in range(max(map(floor, rooms)), 0, -1):
        for room in (room for room in rooms if floor(room) == number):
            path = ROOT / room if room in PROGRAMS else ROOT / "hope_hf" / room
            about = purpose(path if path.suffix else path / "__init__.py")
            lines += wrapped(f"{number}  {room}", about)
            if arrows[room]:
                lines += wrapped("", f"-> {', '.join(sorted(arrows[room]))}")
            for inner in sorted(path.glob("*/__init__.py")):
                lines += wrapped(f"     {inner.parent.name}/", purpose(inner))
    return "```text\n" + "\n".join(lines) + "\n```\n"


def wrapped(left: str, right: str) -> list[str]:
    return textwrap.wrap(right, 119, initial_indent=f"{left:20}", subsequent_indent=" " * 20)


def page_with_map() -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return BLOCK.sub(lambda found: found[1] + diagram() + found[2], text)


if __name__ == "__main__":
    (ROOT / "CONTRIBUTING.md").write_text(page_with_map(), encoding="utf-8")
