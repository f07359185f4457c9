"""What can go wrong without being a mistake in the flags."""


class ExportFailed(RuntimeError):
    """The export did not pass its check, or the Hub did not take it: one sentence for the user."""
