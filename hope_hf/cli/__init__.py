"""Code that the programs share: reading flags, loading models, messages to the user."""
