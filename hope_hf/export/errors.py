"""Failures that are not mistakes in the flags."""


class ExportFailed(RuntimeError):
    """The export did not pass its check, or the upload failed: one sentence for the user."""
