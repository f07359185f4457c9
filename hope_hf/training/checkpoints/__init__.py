"""What a run leaves on the disk and continues from; `python -m hope_hf.training.checkpoints` inspects it."""
