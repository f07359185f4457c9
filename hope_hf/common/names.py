"""Names that flags take, as tables that need no torch; `tests/common/test_names.py` compares each with its subject."""

OPTIMIZERS = ("adamw", "muon", "m3", "delta_momentum")
"""`hope_hf.optim.RULES`."""
PRESETS = ("tiny", "pilot", "mid", "target", "tiny-hybrid", "pilot-hybrid", "mid-hybrid", "target-hybrid")
"""`hope_hf.PRESETS`."""
