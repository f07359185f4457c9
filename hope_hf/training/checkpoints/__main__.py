"""`python -m hope_hf.training.checkpoints info|verify|consolidate DIR`."""

import sys

from .tool import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
