"""Ways of reading a text with facts, which `--tasks` of the suite `recall` chooses."""

READINGS = ("read", "recall", "frozen", "learn", "full")
READ, RECALL, FROZEN, LEARN, FULL = READINGS
