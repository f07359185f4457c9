"""`--dry_run`: is the machine ready for this run? Every run asks a part of it before its first step (`room.py`)."""
