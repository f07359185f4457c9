"""Ctrl-C while a program imports the package, which takes seconds: one sentence and status 130."""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

STATUS = 130
"""Of a program that Ctrl-C has ended, as shells have it."""
# `-m`: Python is about to run one of the package's modules.
_PROGRAMS = ("-m", "run_clm.py", "run_eval.py")


def quit_now(sentence: str = "stopped by Ctrl-C.") -> NoReturn:
    """End this process without cleaning up; prints the sentence on the first process."""
    if os.environ.get("RANK", "0") == "0":
        # A handler of signals may not print: it may have interrupted a print.
        os.write(2, f"\nerror: {sentence}\n".encode())
    os._exit(STATUS)


def while_importing(number, frame):
    """Handler of SIGINT until a program's `main` begins."""
    quit_now()


if Path(next(iter(sys.argv), "")).name in _PROGRAMS:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, while_importing)
