"""The evaluation: `main(argv)` is `hope-hf eval` and run_eval.py."""

from hope_hf.common.program import importing, program

from .flags import parse
from .places import check_places
from .suites import SUITES


@program
def main(argv: list[str]) -> int:
    """Parse `argv`, run the suites, report. Returns 0, 1 if a suite could not run, 2 after a mistake of the user."""
    args = parse(argv, SUITES)
    check_places(args)
    # Not at the top: flags are read and files are looked for without torch, which takes seconds to be imported.
    with importing():
        from .session import begin

    return begin(args)


__all__ = ["main"]
