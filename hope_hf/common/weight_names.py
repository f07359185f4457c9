"""Files of weights by their names: of a model, of an adapter, and of one process."""

import json
import re
from pathlib import Path

from .files import is_inside, read_small
from .process import MISTAKES

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PART = re.compile(r"model-rank(\d+)\.safetensors")
"""What one process of a run with `--save_sharded` writes."""


class Refused(ValueError):
    """The files must not be read: one sentence for the user."""


def parts_of(index: Path) -> list[str]:
    """The files that an index of safetensors names, each once.

    Raises ValueError if it cannot be read, or names anything but safetensors inside its folder.
    """
    try:
        content = json.loads(read_small(index))
        names = set(content["weight_map"].values())
        whole = bool(names) and isinstance(content["metadata"], dict)
    except MISTAKES:
        whole = False
    if not whole:
        raise Refused(f"{index} cannot be read: save the model there again.")
    for name in names:
        if not is_inside(name) or not name.endswith(".safetensors"):
            raise Refused(
                f"{index} names {name!r}, which is not a safetensors file inside its folder: do not trust it."
            )
    return sorted(names)
