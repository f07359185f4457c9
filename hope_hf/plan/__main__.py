"""`python -m hope_hf.plan`."""

import sys

from .run import main

sys.exit(main(sys.argv[1:]))
