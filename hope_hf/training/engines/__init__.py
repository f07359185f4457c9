"""The ways in which processes share a model: one class each, chosen by the launcher's environment (`choose.py`)."""
