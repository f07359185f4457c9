"""Facts that a text states, asked for after it was read."""
