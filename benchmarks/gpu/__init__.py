"""Measurements on one GPU: `run.sh` runs the parts, `pack.sh` gathers what its machine lacks, `report.py` reports."""
