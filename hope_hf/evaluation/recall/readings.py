"""Ways of reading a text with facts, which `--tasks` of the suite `recall` chooses."""

READ, RECALL, FROZEN, LEARN, FULL = READINGS = ("read", "recall", "frozen", "learn", "full")
