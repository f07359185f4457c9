"""Continual learning: segments of a stream by the checkpoints of a run, and classes that come in groups."""
