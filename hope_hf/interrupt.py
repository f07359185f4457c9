"""Ctrl-C while a program imports the package, which takes seconds: one sentence and status 130."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

STATUS = 130
"""Exit status after Ctrl-C, as shells define it."""
_FOLDER = Path(__file__).resolve().parents[1]
_PROGRAMS = {_FOLDER / "run_clm.py", _FOLDER / "run_eval.py"}
_COMMAND = "hope-hf"


def write_now(text: str) -> None:
    """Write to standard error from a signal handler, which must not print: it may have interrupted a print."""
    # The log's disk may be full, or its reader gone.
    with suppress(OSError):
        os.write(2, text.encode())


def quit_now(sentence: str = "stopped by Ctrl-C.") -> NoReturn:
    """End this process without cleaning up; prints the sentence on the first process."""
    # RANK without WORLD_SIZE comes from no launcher.
    if "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0":
        write_now(f"\nerror: {sentence}\n")
    os._exit(STATUS)


def while_importing(number, frame):
    """Handler of SIGINT until a program's `main` begins."""
    quit_now()


def _is_ours(argv: list[str], command: list[str]) -> bool:
    """Whether `sys.argv` and `sys.orig_argv` are those of a program of the package, not of a script that imports it.

    A user's script may be named run_clm.py, too. The console command is wherever pip put it.
    """
    if argv[:1] == ["-m"]:
        # `sys.argv[0]` is "-m" until Python has found the module.
        if "-m" not in command:
            return False
        module = command[command.index("-m") + 1]
        package, *_ = module.split(".")
        return package == "hope_hf"
    if not argv or not argv[0]:
        return False
    program = Path(argv[0])
    return program.name == _COMMAND or program.resolve() in _PROGRAMS


IS_PROGRAM = _is_ours(sys.argv, sys.orig_argv) and signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""Whether this process runs a program of the package, and Ctrl-C is the program's."""
if IS_PROGRAM:
    signal.signal(signal.SIGINT, while_importing)
