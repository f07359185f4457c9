"""Every flag of every program with every kind of wrong value: a sentence and status 2, or a run; never a traceback."""
