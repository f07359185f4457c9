"""The command line's entry: errors of the user become one sentence and an exit status."""

import sys
import warnings
from pathlib import Path

from .launch import is_first_process
from .parsing import parse

_format_warning = warnings.formatwarning


def main(argv: list[str]) -> int:
    """Parse `argv` and train. Returns 0, or 2 after a mistake of the user, or 1 where training diverged.

    A ValueError is one sentence for the user; any other exception is ours or the machine's and keeps its traceback.
    """
    warnings.formatwarning = _as_sentence
    try:
        args = parse(argv)
        # Not at the top: --help and misspelled flags answer before models and data sets are imported.
        from .trainer import TrainingDiverged, UnusableData, train
    except ValueError as error:
        return _complain(error, 2)
    try:
        return train(args)
    except TrainingDiverged as error:
        return _complain(error, 1)
    except ValueError as error:
        return _complain(error, 2, everywhere=isinstance(error, UnusableData))


def _as_sentence(message, category, filename, lineno, line=None) -> str:
    # Ours are for the user, whom the place in the code tells nothing; it tells much about all others.
    if category is UserWarning and Path(filename).is_relative_to(Path(__file__).parents[1]):
        return f"warning: {message}\n"
    return _format_warning(message, category, filename, lineno, line)


def _complain(error: Exception, status: int, everywhere: bool = False) -> int:
    # What all processes meet is said once.
    if everywhere or is_first_process():
        print(f"error: {error}", file=sys.stderr, flush=True)
    return status
