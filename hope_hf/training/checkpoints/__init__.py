"""What a run writes to disk and continues from; `hope-hf checkpoints` inspects it."""
