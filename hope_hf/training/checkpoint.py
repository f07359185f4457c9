"""The old name of `python -m hope_hf.training.checkpoints`."""

import sys

from .checkpoints.tool import main

if __name__ == "__main__":
    print("`hope_hf.training.checkpoint` is now called `hope_hf.training.checkpoints`.", file=sys.stderr)
    sys.exit(main(sys.argv[1:]))
