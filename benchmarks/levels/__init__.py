"""The cases of benchmarks/levels.py, and the texts and readings that they share."""
