"""How much has to be read on a line of code? `python tests/density.py [FOLDER or FILE ...]`.

A row for each: lines of code (without blanks, comments and docstrings), syntax nodes in all and a line, comprehensions
per 100 lines. Well-kept code of this field has 6 to 9 nodes a line and at most 2.5 comprehensions per 100 lines; a `!`
marks what is above. It is a report, and nothing fails: what a reader says counts more.
"""

import ast
import sys
from pathlib import Path

MOST_NODES, MOST_COMPREHENSIONS = 9.0, 2.5
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PACKAGE = Path(__file__).resolve().parents[1] / "hope_hf"
HEAD = "  {:24}{:>8}{:>10}{:>8}{:>8}"
ROW = "{} {:24}{:8,}{:10,}{:8.1f}{:8.1f}"


def lines_of_docstrings(tree: ast.Module) -> set[int]:
    """The numbers of the lines that docstrings take."""
    lines = set()
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines |= set(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def measure(text: str) -> tuple[int, int, int]:
    """Lines of code, syntax nodes and comprehensions of a file's text."""
    tree = ast.parse(text)
    documented = lines_of_docstrings(tree)
    code = 0
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.strip()
        if words and not words.startswith("#") and number not in documented:
            code += 1
    nodes = list(ast.walk(tree))
    comprehensions = sum(isinstance(node, COMPREHENSIONS) for node in nodes)
    return code, len(nodes), comprehensions


def row(place: Path) -> str:
    """The report of a folder, files below it included, or of a file."""
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    code = 0
    nodes = 0
    comprehensions = 0
    for file in files:
        own_code, own_nodes, own_comprehensions = measure(file.read_text(encoding="utf-8"))
        code += own_code
        nodes += own_nodes
        comprehensions += own_comprehensions
    by_line = nodes / max(1, code)
    by_hundred = 100 * comprehensions / max(1, code)
    is_dense = by_line > MOST_NODES or by_hundred > MOST_COMPREHENSIONS
    mark = "!" if is_dense else " "
    return ROW.format(mark, place.name, code, nodes, by_line, by_hundred)


def main(words: list[str]) -> None:
    print(HEAD.format("", "code", "nodes", "a line", "compr."))
    places = [PACKAGE]
    for folder in sorted(PACKAGE.iterdir()):
        if (folder / "__init__.py").is_file():
            places.append(folder)
    if words:
        places = list(map(Path, words))
    for place in places:
        print(row(place))


if __name__ == "__main__":
    main(sys.argv[1:])
