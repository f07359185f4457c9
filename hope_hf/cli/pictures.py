"""Pictures that programs draw beside their numbers: a picture that fails is a warning, never the end of a run."""

import os
import sys
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path


def can_draw() -> bool:
    """Whether there is matplotlib; warns if not. Afterwards matplotlib can be imported whatever MPLBACKEND says.

    Notebooks export their own backend to the processes that they start, and matplotlib fails at import where it is
    not installed. Pictures go to files alone.
    """
    if find_spec("matplotlib") is None:
        warnings.warn("No pictures: matplotlib is not installed (pip install 'hope_hf[plot]').", stacklevel=2)
        return False
    if "matplotlib" not in sys.modules:
        os.environ["MPLBACKEND"] = "agg"
    return True


def as_label(text: str) -> str:
    """A name of the user's as a label: matplotlib would read `$` as mathematics and hide what begins with `_`."""
    label = text.replace("$", r"\$")
    return f" {label}" if label.startswith("_") else label


def draw_or_warn(draw: Callable[[Path], object], path: Path) -> Path | None:
    """Call `draw(path)`; `path`, or None and a warning that names it where the picture fails."""
    if not can_draw():
        return None
    try:
        draw(path)
    # Whatever fails in matplotlib, a font or the disk: the numbers are worth more than their picture.
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        warnings.warn(f"No {path}: the picture failed ({reason}).", stacklevel=2)
        return None
    return path
