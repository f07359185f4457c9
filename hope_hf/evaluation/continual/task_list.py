"""Names of the class-incremental tasks: name -> (data set, how its classes are learned)."""

from .classes import DATA_SETS

TASKS = {f"{data_set}-{way}": (data_set, way) for data_set in DATA_SETS for way in ("in-context", "fine-tuning")}
