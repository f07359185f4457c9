"""The programs `hope-hf chat MODEL` and `hope-hf generate MODEL`.

Flags are read and files are looked for without torch, which takes seconds to be imported.
"""

import sys

from hope_hf.common.flags import require_local
from hope_hf.common.program import importing, printed, program

from .files import text_of
from .flags import Arguments, GenerateArguments, parse, parse_generate


@program
def main(argv: list[str]) -> int:
    """Read the files, and answer messages until the input ends.

    Returns 0, 1 if the answers could not be printed, or 2 after a mistake of the user.
    """
    args = parse(argv)
    texts = {path: text_of(path, "--file") for path in args.file or ()}
    _require_model(args)
    with importing():
        from .run import hold

    hold(args, texts)
    return printed()


@program
def generate(argv: list[str]) -> int:
    """Continue a text. Returns 0, 1 if it could not be printed, or 2 after a mistake of the user."""
    args = parse_generate(argv)
    if args.prompt is None and sys.stdin.isatty():
        raise ValueError("the text is missing: give --prompt TEXT, or pipe it to standard input.")
    _require_model(args)
    with importing():
        from .run import continue_text

    continue_text(args)
    return printed()


def _require_model(args: Arguments | GenerateArguments) -> None:
    """ValueError for a model or tokenizer that is meant as a path and does not exist."""
    require_local(args.model, "MODEL")
    if args.tokenizer_name:
        require_local(args.tokenizer_name, "--tokenizer_name")
