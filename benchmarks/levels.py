"""Levels that learn while they read: what it brings, costs and risks. See --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.levels.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
