"""HOPE and other sequence models of its size, trained alike; `benchmarks/quality.py` is the program."""
