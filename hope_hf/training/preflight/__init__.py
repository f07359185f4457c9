"""`--dry_run`: is the machine ready for this run? Checks, one step, and nothing written."""

from .run import dry_run

__all__ = ["dry_run"]
