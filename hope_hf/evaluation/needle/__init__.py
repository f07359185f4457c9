"""Needles in a haystack after RULER: what is hidden, in which text, and how an answer is scored."""
