"""What a run writes to disk and continues from; `python -m hope_hf.training.checkpoints` inspects it."""
