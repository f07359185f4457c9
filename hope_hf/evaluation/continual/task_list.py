"""Names of the class-incremental tasks: name -> (data set, how its classes are learned)."""

TASKS = {
    f"{data_set}-{way}": (data_set, way)
    for data_set in ("clinc150", "banking77")
    for way in ("in-context", "fine-tuning")
}
