"""HOPE and other sequence models of its size: which predicts held-out text best? See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.quality.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
