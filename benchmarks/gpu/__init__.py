"""Measurements on one GPU: `run.py` runs the parts, `pack.sh` gathers what its machine lacks, `report.py` reports."""
