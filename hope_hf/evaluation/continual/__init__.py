"""What a model forgets: texts by the checkpoints of a run, and classes that come one group after another."""
