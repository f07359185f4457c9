"""Ways of distributing a model over processes: one class each, chosen by the launcher's environment (`choose.py`)."""
