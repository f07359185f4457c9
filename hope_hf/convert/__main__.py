"""`python -m hope_hf.convert`."""

import sys

from .run import main

sys.exit(main(sys.argv[1:]))
