"""What the programs share: reading flags, naming models, speaking to the user in sentences."""
