"""Text from outside on a page of Markdown, shown letter for letter."""

import html
import re

from .public import printable


def as_text(value: object) -> str:
    """`value` on one line, in which no letter is markup, HTML or the edge of a table's cell."""
    # Underscores within a word mark nothing.
    return re.sub(r"[\\`*~$|\[\]]|(?<![^\W_])_+|_+(?![^\W_])", _escaped, html.escape(printable(value), quote=False))


def as_code_block(line: object) -> str:
    """`line` on one line as a block of code."""
    code = printable(line)
    # The fence is longer than any of the code's.
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", code))])
    return f"{fence}\n{code}\n{fence}"


def _escaped(found: re.Match) -> str:
    return "".join(f"\\{letter}" for letter in found[0])
