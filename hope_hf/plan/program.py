"""The program `hope-hf plan`."""

from hope_hf.common.program import importing, program

from .flags import read_flags


@program
def main(argv: list[str]) -> int:
    """Print the plan. Returns 0, 1 if it cannot be printed, or 2 after a mistake or for a batch that fits nowhere."""
    read = read_flags(argv)
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        from .parsing import question_of
        from .run import answer

    return answer(question_of(read))
