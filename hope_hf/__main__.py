"""`python -m hope_hf` is the program `hope-hf`, for launchers that start a module."""

import sys

from hope_hf_main import main

if __name__ == "__main__":
    # Reports and model cards quote the command.
    sys.argv[0] = "hope-hf"
    sys.exit(main())
