"""The trainer: `main(argv)` is `hope-hf train` and run_clm.py.

`look_at_checkpoints` and `plot` are the programs that look at runs."""

from .run import main


def look_at_checkpoints(argv: list[str]) -> int:
    """`hope-hf checkpoints`; returns the exit status."""
    from .checkpoints.tool import main as look

    return look(argv)


def plot(argv: list[str]) -> int:
    """`hope-hf plot`; returns the exit status."""
    from .watch.plot import main as draw

    return draw(argv)


__all__ = ["look_at_checkpoints", "main", "plot"]
