"""The model, flat: these files are copied to the Hub as they stand, and need torch and transformers only."""
