"""Parts of a test program, each in a fork of it: what one imports, the next has not."""

import os
import sys


def apart(part, *arguments: str) -> None:
    """Run a part in a fork; one that fails ends the program."""
    process = os.fork()
    if process == 0:
        status = 1
        try:
            part(*arguments)
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            sys.stderr.flush()
            os._exit(status)
    _, status = os.waitpid(process, 0)
    if status:
        sys.exit(f"{part.__name__} {' '.join(arguments)} failed")
