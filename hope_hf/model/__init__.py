"""The model, flat: these files are copied to the Hub unchanged, and need torch and transformers only."""
