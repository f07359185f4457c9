"""The evaluation: `main(argv)` is `hope-hf eval` and run_eval.py."""

from hope_hf.common.program import program

from .flags import parse


@program
def main(argv: list[str]) -> int:
    """Parse `argv`, run the suites, report. Returns 0, 1 if a suite could not run, 2 after a mistake of the user."""
    # Not imported at the top, since these modules import models and data sets.
    from .session import begin
    from .suites import SUITES

    return begin(parse(argv, SUITES))


__all__ = ["main"]
