"""Small models on synthetic tasks: can an architecture learn to remember, count and copy? See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.synthetic.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
